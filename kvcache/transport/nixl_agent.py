"""NIXL's agent in a thread of its own, which alone touches it: it writes rings' bytes to peers and hears what they say.

Its own progress thread is off, because it polls a whole processor as long as the agent lives. This one polls while
bytes move, looks around a thousand times a second while a lane stands, and sleeps while none does.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
AWAKE_S = 0.02
"""For so long after the last word of a peer more bytes of it may be coming in: they do so only while this polls."""
LOOK_S = 0.001
BREATH_S = 20e-6
"""Between a few polls: what else runs here needs the interpreter, and waits 5 ms for it where nobody rests."""
WRITE_BYTES = 1 << 20
"""At most so much at once: the other side stays awake from one word to the next."""
_POLLS = 16
_NAME = "UCX"


class NixlMissing(ImportError):
    """NIXL is not installed."""


def find_nixl() -> Any:
    """The module that holds NIXL's agent, loaded now and not before. Raises NixlMissing."""
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            logger.debug("event=nixl_not_found module=%s cause=%s", name, error)
    raise NixlMissing("nixl: not installed; pip install 'prfaas[nixl]'")


@dataclass(eq=False)
class Flow:
    """What goes to one peer's ring from a mirror of it here. ``heard`` is called in the agent's thread.

    ``addresses`` are where the mirror and the ring begin. Ranges are written one after another, so that what is said of
    one never overtakes it.
    """

    token: bytes
    peer: str
    addresses: tuple[int, int]
    heard: Callable[[bytes, int], None]
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    handle: Any = None
    spoke_at: float = 0.0


class NixlAgent:
    """``name`` is unique among all agents. Raises NixlMissing; what UCX cannot do shows in ``start``."""

    def __init__(self, name: str, ucx: Mapping[str, str]) -> None:
        self.name = name
        self._nixl = find_nixl()
        self._ucx = dict(ucx)
        self._calls: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._flows: dict[bytes, Flow] = {}
        self._memory: list[tuple[mmap.mmap, mmap.mmap]] = []
        self._awake_until = 0.0
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._made: Future[None] = Future()

    def start(self) -> None:
        """Make the agent. Raises OSError where UCX does not have what its settings name."""
        self._thread.start()
        try:
            self._made.result()
        except Exception as error:
            raise OSError(f"NIXL with {self._ucx}: {error}") from error

    def call(self, work: Callable[[Any], T]) -> Future[T]:
        """Run ``work(agent)`` in the agent's thread."""
        future: Future[T] = Future()
        if self._closing:
            future.set_exception(OSError("the node's NIXL agent is closed"))
            return future
        self._calls.append((work, future))
        self._wake.set()
        return future

    def add(self, flow: Flow) -> None:
        """Write for this flow, and hear what its peer says of it."""
        self.call(lambda _: self._flows.__setitem__(flow.token, flow))

    def write(self, flow: Flow, ranges: Sequence[tuple[int, int]]) -> None:
        """Bring ranges (offset, length) of the mirror to the ring, then say how much that was."""
        self.call(lambda _: flow.waiting.extend(ranges))

    def say(self, flow: Flow, word: bytes, count: int) -> None:
        """Tell the peer a count."""
        self.call(lambda agent: agent.send_notif(flow.peer, _message(flow.token, word, count)))

    def drop(self, flow: Flow) -> Future[None]:
        """Forget a flow: its memory is not read or written here any more once this is done."""

        def forget(agent: Any) -> None:
            self._flows.pop(flow.token, None)
            if flow.handle is not None:
                while agent.check_xfer_state(flow.handle[0]) == "PROC" and time.monotonic() < flow.spoke_at + AWAKE_S:
                    pass
                agent.release_xfer_handle(flow.handle[0])
                flow.handle = None

        return self.call(forget)

    def keep_memory(self, maps: tuple[mmap.mmap, mmap.mmap]) -> None:
        """Keep what a lane had for the next one. It is never unmapped: a write of the peer may still be under way."""
        self._memory.append(maps)

    def take_memory(self) -> tuple[mmap.mmap, mmap.mmap] | None:
        """What an earlier lane had; None where there is none to spare."""
        return self._memory.pop() if self._memory else None

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing = True
        self._wake.set()
        self._thread.join(5.0)

    # ---- in the agent's thread

    def _run(self) -> None:
        try:
            agent = self._make()
        except Exception as error:
            self._made.set_exception(error)
            return
        self._made.set_result(None)
        while not self._closing:
            self._wake.clear()
            self._answer_calls(agent)
            for _ in range(_POLLS):
                self._poll(agent)
            busy = time.monotonic() < self._awake_until or any(f.handle or f.waiting for f in self._flows.values())
            if busy:
                time.sleep(BREATH_S)
            else:
                self._wake.wait(LOOK_S if self._flows else None)
        self._answer_calls(agent)

    def _make(self) -> Any:
        """UCX reads its settings from the environment, once, when the agent is made."""
        before = {key: os.environ.get(key) for key in self._ucx}
        os.environ.update(self._ucx)
        try:
            config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=[_NAME])
            return self._nixl.nixl_agent(self.name, config)
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value

    def _answer_calls(self, agent: Any) -> None:
        while self._calls:
            work, future = self._calls.popleft()
            try:
                future.set_result(work(agent))
            except Exception as error:
                future.set_exception(error)

    def _poll(self, agent: Any) -> None:
        for flow in list(self._flows.values()):
            try:
                self._move(agent, flow)
            except Exception as error:
                logger.info("event=nixl_flow_failed peer=%s cause=%s", flow.peer, error)
                self._flows.pop(flow.token, None)
                flow.heard(b"!", 0)
        for peer, messages in agent.get_new_notifs().items():
            self._awake_until = time.monotonic() + AWAKE_S
            for message in messages:
                self._hear(peer, message)

    def _move(self, agent: Any, flow: Flow) -> None:
        if flow.handle is not None:
            handle, count = flow.handle
            state = agent.check_xfer_state(handle)
            if state == "PROC":
                return
            flow.handle = None
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise OSError(f"a write of {count} bytes ended as {state}")
        if flow.waiting:
            now = time.monotonic()
            if now > flow.spoke_at + AWAKE_S / 2:
                agent.send_notif(flow.peer, _message(flow.token, b"b", 0))  # be awake for what follows
            flow.spoke_at = now
            at, count = flow.waiting.popleft()
            mirror, ring = flow.addresses
            here = agent.get_xfer_descs([(mirror + at, count, 0)], "DRAM")
            there = agent.get_xfer_descs([(ring + at, count, 0)], "DRAM")
            handle = agent.initialize_xfer("WRITE", here, there, flow.peer, _message(flow.token, b"w", count))
            flow.handle = handle, count
            if agent.transfer(handle) == "ERR":
                raise OSError(f"a write of {count} bytes was not begun")

    def _hear(self, peer: str, message: bytes) -> None:
        token, word, count = message[:16], message[16:17], message[17:]
        flow = self._flows.get(token)
        if flow is not None and flow.peer == peer and word in (b"w", b"f") and len(count) == 4:
            flow.heard(word, int.from_bytes(count, "big"))


def split(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges in pieces of at most ``WRITE_BYTES``."""
    return list(
        itertools.chain.from_iterable(
            [(at + done, min(WRITE_BYTES, count - done)) for done in range(0, count, WRITE_BYTES)]
            for at, count in ranges
        )
    )


def _message(token: bytes, word: bytes, count: int) -> bytes:
    return token + word + count.to_bytes(4, "big")
