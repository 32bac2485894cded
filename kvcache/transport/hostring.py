"""A channel between two processes of one host: each fills a small ring of the other's memory, and says how much.

Bytes are copied twice, into the ring and out of it, while it lies in a processor's cache. Nothing else is shared: no
page of a pool is mapped or referred to by a peer, so there is nothing that it could read, or that must not change.
Counts go over a unix socket, whose end is the channel's; the kernel orders them behind the bytes that they count. Each
wakes the other process, which costs more than copying what it counts: they are put together.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence

from kvcache.transport.channel import MAX_VIEWS, Channel
from kvcache.transport.ring import SHM, RingError, RingReader, RingWriter

RING_BYTES = 4 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_COUNT = struct.Struct("=BI")
_WRITTEN, _FREED = 1, 2
_COUNTS_A_TURN = 64
_WORTH_TELLING = RING_BYTES // 4
"""So much is said at once; less when this turn of the loop has brought all that it brings."""


class Ring:
    """Memory of ``RING_BYTES`` that whoever holds ``fd`` can map; its size can never change."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd``. Raises RingError for what is no such memory: a peer could cut it off under our feet."""
        try:
            try:
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError:
                sealed = False
            if not sealed or os.fstat(fd).st_size != RING_BYTES:
                raise RingError(f"what was handed over is no sealed memory of {RING_BYTES} bytes")
            self._map = mmap.mmap(fd, RING_BYTES, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls) -> tuple[Ring, int]:
        """A new one, and a descriptor to hand over and close. Raises OSError."""
        fd = os.memfd_create("prfaas-kv-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, RING_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(os.dup(fd)), fd
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Give it up. Idempotent."""
        self.memory.release()
        self._map.close()


class RingChannel(Channel):
    """Owns the socket and both rings; the peer fills ``mine`` and reads ``theirs``. Belongs to the running loop."""

    transport = SHM

    def __init__(self, sock: socket.socket, mine: Ring, theirs: Ring) -> None:
        self._sock = sock
        self._rings = (mine, theirs)
        self._reader = RingReader(mine.memory)
        self._writer = RingWriter(theirs.memory)
        self._loop = asyncio.get_running_loop()
        self._readable: Callable[[], None] | None = None
        self._writable: Callable[[], None] | None = None
        self._untold = {_WRITTEN: 0, _FREED: 0}
        self._telling = False
        self._tell_soon: asyncio.Handle | None = None
        self._end: OSError | None = None
        self._unheard: OSError | None = None
        self._ended = False
        self._loop.add_reader(sock.fileno(), self._hear)

    @property
    def buffered(self) -> bool:
        return self._reader.available > 0

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        if self._reader.available:
            count = self._reader.take(buffers[:MAX_VIEWS])
            self._tell(_FREED, self._reader.give_back())
            return count
        if self._end is not None:
            raise self._end
        return 0 if self._ended else None

    def send(self, views: Sequence[memoryview]) -> int | None:
        if self._ended or self._unheard is not None:
            raise self._end or self._unheard or ConnectionResetError("closed by the peer")
        count = self._writer.put(views[:MAX_VIEWS])
        self._tell(_WRITTEN, count)
        return count or None

    def watch_readable(self, callback: Callable[[], None] | None) -> None:
        self._readable = callback

    def watch_writable(self, callback: Callable[[], None] | None) -> None:
        self._writable = callback
        if callback is not None and self._writer.room:
            self._loop.call_soon(self._call, "_writable")

    def finish(self) -> None:
        self._tell_rest()
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            if self._tell_soon is not None:
                self._tell_soon.cancel()
            self._tell_rest()
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            for ring in self._rings:
                ring.close()

    def _hear(self) -> None:
        """Take what the peer says: how much it has written, how much it has read."""
        try:
            for _ in range(_COUNTS_A_TURN):
                said = self._sock.recv(_COUNT.size + 1)
                if len(said) != _COUNT.size:
                    self._ended = True
                    if said:
                        raise RingError(f"{len(said)} bytes are no count")
                    break
                kind, count = _COUNT.unpack(said)
                if kind == _WRITTEN:
                    self._reader.arrived(count)
                elif kind == _FREED:
                    self._writer.freed(count)
                else:
                    raise RingError(f"{kind} is no kind of count")
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._end, self._ended = error, True
        if self._ended:
            self._loop.remove_reader(self._sock.fileno())
        if self._reader.available or self._ended:
            self._call("_readable")
        if self._sock.fileno() >= 0 and (self._writer.room or self._ended):  # who was called may have closed it
            self._call("_writable")

    def _call(self, which: str) -> None:
        callback = getattr(self, which)
        if callback is not None:
            callback()

    def _tell(self, kind: int, count: int) -> None:
        """Say a count, now or with what else this turn of the loop brings."""
        self._untold[kind] += count
        if self._untold[kind] >= _WORTH_TELLING:
            self._say(kind)
        elif self._untold[kind] and self._tell_soon is None:
            self._tell_soon = self._loop.call_soon(self._tell_rest)

    def _tell_rest(self) -> None:
        self._tell_soon = None
        for kind in self._untold:
            self._say(kind)

    def _say(self, kind: int) -> None:
        """What the socket does not take at once is said when it does."""
        if not self._untold[kind]:
            return
        try:
            self._sock.send(_COUNT.pack(kind, self._untold[kind]))
            self._untold[kind] = 0
        except (BlockingIOError, InterruptedError):
            if not self._telling:
                self._telling = True
                self._loop.add_writer(self._sock.fileno(), self._tell_on)
        except OSError as error:
            self._unheard = error  # what the peer said before it went can still be read

    def _tell_on(self) -> None:
        self._telling = False
        self._loop.remove_writer(self._sock.fileno())
        self._tell_rest()


async def hand_over(sock: socket.socket, hello: bytes) -> RingChannel:
    """Give the other side memory to fill, and take its. ``sock`` (SEQPACKET) moves into the channel, or is closed.

    Raises OSError, RingError for anything but ``hello`` and one ring.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        mine, fd = Ring.create()
        undo.callback(mine.close)
        try:
            socket.send_fds(sock, [hello], [fd])  # the first message of a connection always fits
        finally:
            os.close(fd)
        theirs = await _take_ring(sock, hello)
        undo.pop_all()
        return RingChannel(sock, mine, theirs)


async def _take_ring(sock: socket.socket, hello: bytes) -> Ring:
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())
    said, fds, flags, _ = socket.recv_fds(sock, len(hello) + 1, 4)
    if said == hello and len(fds) == 1 and not flags & socket.MSG_CTRUNC:
        return Ring(fds[0])
    for fd in fds:
        os.close(fd)
    raise RingError(f"one ring and {hello!r} belong there, got {len(fds)} and {said[:32]!r}")
