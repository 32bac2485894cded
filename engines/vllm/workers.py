"""The node's end of its vLLM workers' sockets: hand out the pool, wait until all are there, and talk to all at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from engines.channel import ChannelError, frame, read_message
from engines.protocol import EngineLost
from engines.vllm.messages import GREETING, Attached, FromWorker, PoolInfo, Refusal, from_worker
from kvcache.hostpool import HostPool

Received = Callable[[int, FromWorker, int], None]
"""Told what a worker says: its rank, the message, its bytes."""


class Workers:
    """Accepts workers at a socket of its own. ``received`` and ``lost`` are called from the event loop."""

    def __init__(
        self, path: Path, pool: HostPool, info: PoolInfo, received: Received, lost: Callable[[str], None]
    ) -> None:
        """Binds ``path``, in a directory that nobody else reaches."""
        self._pool = pool
        self._greeting = frame(info)
        self._received = received
        self._lost = lost
        self._attached: dict[int, Attached] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._refusal: str | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen()
        self._tasks = {asyncio.create_task(self._accept())}

    @property
    def ranks(self) -> int:
        """How many there are; 0 before all are there."""
        return len(self._attached) if self._complete.is_set() else 0

    @property
    def packing(self) -> str:
        """How their kernels pack KV."""
        return self._attached[0].packing

    async def complete(self) -> None:
        """Return when every worker has attached. Raises EngineLost where one cannot serve."""
        await self._complete.wait()
        if self._refusal is not None:
            raise EngineLost(f"cannot serve this model by vLLM: {self._refusal}")

    def send(self, message: msgspec.Struct) -> None:
        """Say this to every worker. Raises ValueError for a message that is too large."""
        data = frame(message)
        for writer in self._writers.values():
            writer.write(data)

    async def close(self) -> None:
        """Close all sockets, by which workers end. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers.values():
            writer.close()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            try:
                socket.send_fds(sock, [GREETING], [self._pool.fd])
            except OSError:
                sock.close()
                continue
            reader, writer = await asyncio.open_unix_connection(sock=sock)
            writer.write(self._greeting)
            task = asyncio.create_task(self._follow(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        cause = "a worker closed its socket"
        try:
            while (received := await read_message(reader, from_worker)) is not None:
                message, size = received
                if isinstance(message, Refusal):
                    self._refusal = message.reason
                    self._complete.set()
                elif isinstance(message, Attached):
                    rank = message.rank
                    self._attach(message, writer)
                elif rank is not None:
                    self._received(rank, message, size)
        except ChannelError as error:
            cause = f"a worker broke the protocol: {error}"
        finally:
            with contextlib.suppress(OSError):
                writer.close()
        if rank is not None:
            self._lost(cause)

    def _attach(self, message: Attached, writer: asyncio.StreamWriter) -> None:
        self._attached[message.rank] = message
        self._writers[message.rank] = writer
        if len({each.packing for each in self._attached.values()}) > 1:
            self._refusal = "its workers pack their KV caches in different ways"
            self._complete.set()
        elif len(self._attached) == message.ranks:
            self._complete.set()
