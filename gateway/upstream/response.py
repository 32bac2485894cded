"""A response as a coroutine reads it: parts in order, no more in memory than a bound, closed when left unread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType

from gateway.upstream.connection import Connection
from gateway.upstream.errors import Cause, UpstreamError
from gateway.upstream.head import Headers, ResponseHead

HIGH_BYTES = 256 << 10
"""So much unread, and the connection is read no further until it was read."""


class Response:
    """``status``, ``headers`` (lower-case names), and a body to read once: ``body`` part by part, or ``read``.

    Whoever does not read it to its end must ``close`` it, best by ``async with``.
    """

    verbatim = False

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: Headers = ()
        self._connection: Connection | None = connection
        self._loop = loop
        self._head: asyncio.Future[None] = loop.create_future()
        self._parts: deque[bytes] = deque()
        self._unread = 0
        self._ended = False
        self._error: UpstreamError | None = None
        self._wake: asyncio.Future[None] | None = None

    def header(self, name: str) -> str | None:
        """The first header of that lower-case name."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self.headers if key == wanted), None)

    @property
    def body(self) -> AsyncIterator[bytes]:
        """The parts of the body as they come. Raises UpstreamError."""
        return self._read_parts()

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises UpstreamError: also too_large beyond ``limit`` bytes, and then closes."""
        parts: list[bytes] = []
        size = 0
        async for part in self.body:
            size += len(part)
            if size > limit:
                self.close()
                raise UpstreamError(Cause.TOO_LARGE, f"a body of more than {limit} bytes", sent=True, answered=True)
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Give up what was not read: the connection is closed, by which the server knows. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None and not self._ended:
            self._ended = True
            connection.abandon()
        self._parts.clear()

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def opened(self) -> None:
        """Return when the head is here. Raises UpstreamError."""
        await self._head

    async def _read_parts(self) -> AsyncIterator[bytes]:
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._unread -= len(part)
                if self._connection is not None and self._unread < HIGH_BYTES // 2 and not self._ended:
                    self._connection.resume()
                yield part
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._wake = self._loop.create_future()
            await self._wake

    # ---- what the connection calls

    def on_head(self, head: ResponseHead) -> None:
        """The head is here."""
        self.status, self.headers = head.status, head.headers
        if not self._head.done():
            self._head.set_result(None)

    def flush(self) -> None:
        """Nothing waits."""

    def on_chunks(self, framed: bytes) -> None:
        """Never called: chunks are taken apart."""
        raise AssertionError

    def on_data(self, data: bytes) -> None:
        """A part of the body."""
        self._parts.append(data)
        self._unread += len(data)
        if self._unread > HIGH_BYTES and self._connection is not None:
            self._connection.pause()
        self._woken()

    def on_end(self) -> None:
        """The body is whole."""
        self._ended = True
        self._woken()

    def on_failure(self, error: UpstreamError) -> None:
        """It broke off."""
        self._ended, self._error = True, error
        if not self._head.done():
            self._head.set_exception(error)
        self._woken()

    def _woken(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
