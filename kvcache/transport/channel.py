"""A connected, non-blocking stream socket, plain or TLS, behind one face.

asyncio's own transports copy what they cannot send at once and read into one buffer at a time. Here the kernel reads
into and writes from the memory of the KV pool itself, scattered over its pages.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

from kvcache.session import PeerRefused

MAX_VIEWS = 64


class Channel:
    """Owns ``sock``. ``receive`` and ``send`` answer None where they would block and raise OSError on failure."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @property
    def buffered(self) -> bool:
        """Whether bytes wait in this process, which polling the socket would not show."""
        return False

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        """Fill ``buffers`` in order with what is there; 0 at the end of the stream."""
        try:
            if len(buffers) == 1:
                return self.sock.recv_into(buffers[0])
            return self.sock.recvmsg_into(buffers[:MAX_VIEWS])[0]
        except (BlockingIOError, InterruptedError):
            return None

    def send(self, views: Sequence[memoryview]) -> int | None:
        """Hand as much of ``views`` as fits, in order, to the kernel."""
        try:
            return self.sock.sendmsg(views[:MAX_VIEWS])
        except (BlockingIOError, InterruptedError):
            return None

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """As ``receive``, waiting for bytes."""
        while (count := self.receive(buffers)) is None:
            await wait_ready(self.sock, writing=False)
        return count

    async def send_all(self, data: bytes) -> None:
        """Send all of ``data``."""
        rest = memoryview(data)
        while rest:
            count = self.send([rest])
            if count is None:
                await wait_ready(self.sock, writing=True)
            else:
                rest = rest[count:]

    def close(self) -> None:
        """Close the socket; harmless when repeated."""
        self.sock.close()


class TlsChannel(Channel):
    """TLS 1.3, where sending never waits for receiving or the other way round."""

    sock: ssl.SSLSocket

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
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await wait_ready(wrapped, writing=False)
                except ssl.SSLWantWriteError:
                    await wait_ready(wrapped, writing=True)
            if wrapped.version() != "TLSv1.3":
                raise PeerRefused("tls", f"TLSv1.3 is needed, {wrapped.version()} was agreed")
        except ssl.SSLCertVerificationError as error:
            wrapped.close()
            raise PeerRefused("tls", f"the certificate is not accepted: {error.verify_message}") from error
        except BaseException:
            wrapped.close()
            raise
        return cls(wrapped)

    @property
    def buffered(self) -> bool:
        return self.sock.pending() > 0

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        total = 0
        for buffer in buffers:
            while buffer:
                try:
                    count = self.sock.recv_into(buffer)
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
                count = self.sock.send(view)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return total or None
            total += count
            if count < len(view):
                break
        return total


async def wait_ready(sock: socket.socket, writing: bool) -> None:
    """Wait until ``sock`` can be written or read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    fd = sock.fileno()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)
