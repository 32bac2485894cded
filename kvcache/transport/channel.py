"""What carries a connection's bytes, behind one face: a connected, non-blocking socket, plain or TLS, or a lane.

asyncio's own transports copy what they cannot send at once and read into one buffer at a time. Here the kernel reads
into and writes from the memory of the KV pool itself, scattered over its pages.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvcache.session import PeerRefused

TCP = "tcp"
MAX_VIEWS = 64


class Channel(ABC):
    """A stream of bytes each way. ``receive`` and ``send`` answer None where they would block, OSError on failure."""

    transport = TCP
    """What it goes by."""

    @property
    def sock(self) -> socket.socket | None:
        """The network socket, whose path the kernel can tell of; None where there is none."""
        return None

    @property
    def buffered(self) -> bool:
        """Whether bytes wait in this process, of which no readiness will tell."""
        return False

    @abstractmethod
    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        """Fill ``buffers`` in order with what is there; 0 at the end of the stream."""

    @abstractmethod
    def send(self, views: Sequence[memoryview]) -> int | None:
        """Take as much of ``views`` as fits, in order."""

    @abstractmethod
    def watch_readable(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called whenever there is something to receive, or the end; None for no more."""

    @abstractmethod
    def watch_writable(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called whenever ``send`` would take something; None for no more."""

    @abstractmethod
    def finish(self) -> None:
        """Send nothing any more; what was sent can still be received. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; harmless when repeated."""

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """As ``receive``, waiting for bytes."""
        while (count := self.receive(buffers)) is None:
            await _ready(self.watch_readable)
        return count

    async def send_all(self, data: bytes) -> None:
        """Send all of ``data``."""
        rest = memoryview(data)
        while rest:
            count = self.send([rest])
            if count is None:
                await _ready(self.watch_writable)
            else:
                rest = rest[count:]


class SocketChannel(Channel):
    """Owns a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        try:
            if len(buffers) == 1:
                return self._sock.recv_into(buffers[0])
            return self._sock.recvmsg_into(buffers[:MAX_VIEWS])[0]
        except (BlockingIOError, InterruptedError):
            return None

    def send(self, views: Sequence[memoryview]) -> int | None:
        try:
            return self._sock.sendmsg(views[:MAX_VIEWS])
        except (BlockingIOError, InterruptedError):
            return None

    def watch_readable(self, callback: Callable[[], None] | None) -> None:
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        if callback is not None:
            loop.add_reader(fd, callback)
        else:
            loop.remove_reader(fd)

    def watch_writable(self, callback: Callable[[], None] | None) -> None:
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        if callback is not None:
            loop.add_writer(fd, callback)
        else:
            loop.remove_writer(fd)

    def finish(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()


class TlsChannel(SocketChannel):
    """TLS 1.3, where sending never waits for receiving or the other way round."""

    _sock: ssl.SSLSocket

    @classmethod
    async def over(
        cls, sock: socket.socket, context: ssl.SSLContext, server_side: bool, server_hostname: str | None
    ) -> TlsChannel:
        """Shake hands on a connected socket, which moves into the channel or is closed.

        Raises OSError; PeerRefused (field ``tls``) for an unknown certificate or an older TLS.
        """
        wrapped = context.wrap_socket(
            sock, server_side=server_side, do_handshake_on_connect=False, server_hostname=server_hostname
        )
        channel = cls(wrapped)
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await _ready(channel.watch_readable)
                except ssl.SSLWantWriteError:
                    await _ready(channel.watch_writable)
            if wrapped.version() != "TLSv1.3":
                raise PeerRefused("tls", f"TLSv1.3 is needed, {wrapped.version()} was agreed")
        except ssl.SSLCertVerificationError as error:
            wrapped.close()
            raise PeerRefused("tls", f"the certificate is not accepted: {error.verify_message}") from error
        except BaseException:
            wrapped.close()
            raise
        return channel

    @property
    def buffered(self) -> bool:
        return self._sock.pending() > 0

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        total = 0
        for buffer in buffers:
            while buffer:
                try:
                    count = self._sock.recv_into(buffer)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return total or None
                except OSError:
                    if total:
                        return total
                    raise
                if count == 0:
                    return total
                total += count
                buffer = buffer[count:]
        return total

    def send(self, views: Sequence[memoryview]) -> int | None:
        total = 0
        for view in views:
            try:
                count = self._sock.send(view)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return total or None
            total += count
            if count < len(view):
                break
        return total


async def _ready(watch: Callable[[Callable[[], None] | None], None]) -> None:
    """Return when what is watched is ready."""
    ready = asyncio.Event()
    watch(ready.set)
    try:
        await ready.wait()
    finally:
        watch(None)
