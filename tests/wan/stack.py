"""A stack at the far end of a link, with one prefill node at the near end.

The KV crosses the link, under TLS; the node's control stream reaches the gateway beside it, as if by another network.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.progress import Progress
from deploy.stack import NodeSpec, Process, Stack, StackSpec
from node.bench.kv.certificates import Root
from tests.stacks import RunningStack, node
from tests.wan.link import Wan

REMOTE = "east-prefill"
LOCAL_PREFILL = "local-prefill"
CLUSTER = "east"
GATEWAY = "gateway.cli:main"


class WanStack(Stack):
    """Starts ``REMOTE`` at the near end and all others where the calling thread is, which must be the far end."""

    def __init__(self, spec: StackSpec, progress: Progress, wan: Wan, gateway: str) -> None:
        super().__init__(spec, progress)
        self._wan = wan
        self._gateway = gateway

    def start_process(self, name: str, command: str, arguments: Sequence[str]) -> Process:
        """As everywhere, but at its end of the link, and with the gateway command given."""
        if name == "gateway":
            return super().start_process(name, self._gateway, arguments)
        if name != REMOTE:
            return super().start_process(name, command, arguments)
        with self._wan.near.entered():
            return super().start_process(name, command, arguments)


@contextlib.contextmanager
def wan_stack(
    wan: Wan,
    model_dir: Path,
    log_dir: Path,
    gateway: str = GATEWAY,
    local_prefill: bool = False,
    options: Sequence[str] = (),
    **settings: Any,
) -> Iterator[RunningStack]:
    """A gateway (the command ``gateway``) and a decode node at the far end, and ``REMOTE``; all nodes have ``options``.

    With ``local_prefill`` there is a prefill node at the far end too. The calling thread is at the far end meanwhile.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    nodes = tuple(replace(each, options=(*each.options, *options)) for each in _nodes(wan, log_dir, local_prefill))
    spec = StackSpec(model_dir=model_dir, model_name=model_dir.name, log_dir=log_dir, nodes=nodes, **settings)
    with wan.far.entered():
        stack = WanStack(spec, Progress(Console(file=io.StringIO())), wan, gateway)
        with _control_passage(wan, stack.port), stack:
            running = RunningStack(stack)
            try:
                yield running
            finally:
                running.http.close()


def _nodes(wan: Wan, directory: Path, local_prefill: bool) -> tuple[NodeSpec, ...]:
    root = Root()
    (directory / "ca.pem").write_text(root.certificate)

    def tls(name: str, host: str | None) -> list[str]:
        certified = root.certify(name, host)
        options = ["--kv-tls-ca", str(directory / "ca.pem")]
        for flag, text in (("cert", certified.certificate), ("key", certified.key)):
            path = directory / f"{name}.{flag}"
            path.write_text(text)
            options += [f"--kv-tls-{flag}", str(path)]
        return options

    nodes = (
        node(REMOTE, CLUSTER, "prefill", "--kv-host", wan.near.address, *tls(REMOTE, wan.near.address)),
        node("local-decode", "local", "decode", *tls("local-decode", None)),
    )
    if local_prefill:
        nodes += (node(LOCAL_PREFILL, "local", "prefill", *tls(LOCAL_PREFILL, "127.0.0.1")),)
    return nodes


@contextlib.contextmanager
def _control_passage(wan: Wan, port: int) -> Iterator[None]:
    """The near end's loopback port ``port`` leads to that of the far end, where the calling thread is."""
    with wan.near.entered():
        listener = socket.create_server(("127.0.0.1", port))
    sockets = [listener]

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                sockets.append(near)
                far = socket.create_connection(("127.0.0.1", port))
                sockets.append(far)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
