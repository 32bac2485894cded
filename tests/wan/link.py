"""The link as tests use it: ``with wide_area(LinkSettings(...)) as wan:`` gives two ends to run things at."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.wan.direction import Counters, LinkSettings
from tests.wan.namespaces import entered, fresh_namespace, open_tun

ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 9000
ANSWER_S = 10.0
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class End:
    """One end of the link: a network namespace with one address, and a loopback of its own."""

    address: str
    namespace: int

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts the calling thread is at this end; sockets made meanwhile stay there."""
        return entered(self.namespace)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process at this end; ``options`` are those of Popen."""
        with self.entered():
            return subprocess.Popen(command, **options)


class Wan:
    """Two ends and the carrier between them. Use ``wide_area``."""

    def __init__(self, ends: tuple[End, End], control: socket.socket) -> None:
        self.near, self.far = ends
        self._control = control

    def change(self, settings: LinkSettings) -> None:
        """New settings from now on, for packets that are not yet on the line. The seed stays the first one's."""
        self._ask(asdict(settings))

    def counters(self) -> tuple[Counters, Counters]:
        """From the near end to the far one, and back."""
        there, back = self._ask(None)["directions"]
        return Counters(**there), Counters(**back)

    def cpu_s(self) -> float:
        """Processor time of the carrier so far: what the two kernels do on arrival of a packet is in it."""
        return float(self._ask(None)["cpu_s"])

    def _ask(self, order: dict[str, Any] | None) -> dict[str, Any]:
        self._control.send(json.dumps(order).encode())
        answer = self._control.recv(4096)
        if not answer:
            raise RuntimeError("the link's carrier has ended")
        state: dict[str, Any] = json.loads(answer)
        return state


@contextlib.contextmanager
def wide_area(settings: LinkSettings | None = None, mtu: int = MTU) -> Iterator[Wan]:
    """A link for as long as the block lasts; processes at its ends are the caller's to end.

    Raises WanUnavailable where the machine does not allow one.
    """
    settings = settings or LinkSettings()
    with contextlib.ExitStack() as stack:
        ends, tuns = [], []
        for address in ADDRESSES:
            namespace = fresh_namespace()
            stack.callback(os.close, namespace)
            ends.append(End(address, namespace))
            tuns.append(open_tun(namespace, address, mtu))
            stack.callback(os.close, tuns[-1])
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = (str(theirs.fileno()), *map(str, tuns), json.dumps(asdict(settings)))
            command = (sys.executable, "-m", "tests.wan.carrier", *arguments)
            carrier = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(), *tuns))
        stack.callback(carrier.wait)
        stack.callback(control.close)
        control.settimeout(ANSWER_S)
        wan = Wan((ends[0], ends[1]), control)
        wan.counters()
        yield wan
