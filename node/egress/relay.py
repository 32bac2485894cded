"""One TLS port for the KV nodes of a cluster: connections are passed on, unopened, to the node that their SNI names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from kvcache.control import KvAddress
from node.egress.sni import NotTls, server_name

log = logging.getLogger(__name__)

_CHUNK = 256 << 10


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Times in seconds. Each connection takes one descriptor on either side and two buffers of 256 KiB."""

    max_connections: int = 1024
    hello_s: float = 5.0
    connect_s: float = 4.0


class SniRelay:
    """Only the names in ``routes`` (lower case) are passed on, each to its own address: a caller chooses no other."""

    def __init__(self, routes: Mapping[str, KvAddress], limits: RelayLimits | None = None) -> None:
        self._routes = dict(routes)
        self._limits = limits or RelayLimits()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """Those that are being passed on, or about to be."""
        return len(self._tasks)

    async def listen(self, host: str, port: int) -> int:
        """Begin to accept; returns the port. Raises OSError where the address cannot be bound."""
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(sock))
        bound: int = sock.getsockname()[1]
        return bound

    async def close(self) -> None:
        """End the port and every connection. Idempotent."""
        tasks = [*self._tasks, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError as error:
                    log.warning("event=accept_failed cause=%s", error)
                    await asyncio.sleep(1.0)
                    continue
                if len(self._tasks) >= self._limits.max_connections:
                    log.warning("event=relay_full connections=%d", len(self._tasks))
                    client.close()
                    continue
                task = asyncio.create_task(self._serve(client))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        with client:
            client.setblocking(False)
            try:
                async with asyncio.timeout(self._limits.hello_s):
                    name, begun = await _read_hello(client)
                address = self._routes.get(name)
                if address is None:
                    log.warning("event=relay_refused name=%r", name[:255])
                    return
                async with asyncio.timeout(self._limits.connect_s):
                    node = await _connect(address)
            except (NotTls, OSError) as error:
                log.warning("event=relay_refused cause=%s", error or type(error).__name__)
                return
            with node:
                await _join(client, node, begun)


async def _read_hello(client: socket.socket) -> tuple[str, bytes]:
    """The name that a connection asks for, and the bytes that said so. Raises NotTls, OSError."""
    loop = asyncio.get_running_loop()
    begun = b""
    while True:
        part = await loop.sock_recv(client, 16 << 10)
        if not part:
            raise NotTls("closed before a whole ClientHello")
        begun += part
        name = server_name(begun)
        if name is not None:
            return name, begun


async def _connect(address: KvAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _join(client: socket.socket, node: socket.socket, begun: bytes) -> None:
    """Pass bytes both ways until both sides have ended, or either has broken."""
    for sock in (client, node):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ways = [asyncio.create_task(_pump(client, node, begun)), asyncio.create_task(_pump(node, client, b""))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pump(source: socket.socket, sink: socket.socket, begun: bytes) -> None:
    """One way, with the end of the stream; back-pressure is the sockets' own. Raises OSError."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sink, begun)
    buffer = memoryview(bytearray(_CHUNK))
    while count := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(sink, buffer[:count])
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
