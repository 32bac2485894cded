"""Help for transport tests: a handler that records, endpoints of made-up nodes, a proxy that can fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache.control import KvAddress
from kvcache.transport import Connection, Expected, KvEndpoint, LocalIdentity, Peer, TransportLimits
from kvcache.transport.interface import TransferFrame
from kvcache.wire import Data, Role

T = b"t" * 16
QUICK = TransportLimits(
    ping_every_s=0.1,
    lost_after_s=0.5,
    resume_s=0.6,
    handshake_s=0.5,
    connect_s=0.5,
    backoff_most_s=0.2,
    connections=1,
)
"""Short times, and one connection for each pair."""


async def send_data(
    peer: Peer, header: Data, payload: Sequence[bytes | bytearray | memoryview], left: int = 0
) -> Connection:
    """Submit a piece and wait until its memory is no longer referred to; the connection that took it."""
    item = peer.submit(header, payload, left)
    try:
        return await peer.carried(item)
    except asyncio.CancelledError:
        peer.drop(item)
        raise


def key_of(name: str) -> Ed25519PrivateKey:
    """One fixed key for each name."""
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))


def local(name: str, incarnation: str = "1", fingerprint: str = "same", key: str = "") -> LocalIdentity:
    return LocalIdentity(name, incarnation, key_of(key or name), fingerprint, lambda: Role.PREFILL)


def who(name: str, incarnation: str = "1") -> Expected:
    """That node as its gateway would name it."""
    return Expected(name, incarnation, key_of(name).public_key().public_bytes_raw())


def data(seq: int, wire_bytes: int, transfer: bytes = T) -> Data:
    return Data(transfer, seq, 0, 0, 0, 0, 1, "float32", "raw", wire_bytes, wire_bytes, bytes(16))


def soon(seconds: float = 5.0) -> float:
    """A deadline in the loop's time."""
    return asyncio.get_running_loop().time() + seconds


async def until(condition: Callable[[], object], seconds: float = 5.0) -> float:
    """Wait for ``condition``; how long that took. Fails after ``seconds``."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "the condition did not come true"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


class Recorder:
    """A FrameHandler that keeps what comes. Payload memory is made anew for each frame unless ``target`` is set."""

    def __init__(self) -> None:
        self.frames: list[TransferFrame] = []
        self.memory: dict[tuple[bytes, int], bytearray] = {}
        self.arrived: list[tuple[bytes, int]] = []
        self.lost: list[tuple[str, str]] = []
        self.broken: list[tuple[Connection, Data | None]] = []
        self.peers: list[Peer] = []
        self.target: Callable[[Peer, Data], Sequence[memoryview] | None] | None = None
        self.on: Callable[[Peer, TransferFrame | Data], None] = lambda peer, frame: None

    def on_frame(self, peer: Peer, frame: TransferFrame) -> None:
        self._met(peer)
        self.frames.append(frame)
        self.on(peer, frame)

    def payload_target(self, peer: Peer, data: Data) -> Sequence[memoryview] | None:
        self._met(peer)
        if self.target is not None:
            return self.target(peer, data)
        room = self.memory[data.transfer, data.seq] = bytearray(data.wire_bytes)
        cut = data.wire_bytes // 2
        return [memoryview(room)[:cut], memoryview(room)[cut:]]

    def on_data(self, peer: Peer, data: Data) -> None:
        self.arrived.append((data.transfer, data.seq))
        self.on(peer, data)

    def on_broken(self, peer: Peer, connection: Connection, unfinished: Data | None) -> None:
        self.broken.append((connection, unfinished))

    def on_lost(self, peer: Peer, cause: str) -> None:
        self.lost.append((peer.identity.node_id, cause))

    def _met(self, peer: Peer) -> None:
        if peer not in self.peers:
            self.peers.append(peer)


class Proxy:
    """Forwards one way and the other until ``silent`` is set; then it swallows everything (or, where ``swallows`` is
    false, reads nothing more) and closes nothing."""

    def __init__(self, port: int, swallows: bool = True) -> None:
        self.silent = False
        self._swallows = swallows
        self._stopped = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._to = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> KvAddress:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return KvAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, there_writer]
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await source.read(65536):
                if self.silent and not self._swallows:
                    await self._stopped.wait()
                if not self.silent:
                    sink.write(part)
                    await sink.drain()
        if not self.silent:
            sink.close()

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()
        self._stopped.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


Net = Callable[..., Awaitable[tuple[KvEndpoint, Recorder]]]
"""Makes an endpoint by name, closed at the test's end."""
