"""HTTP/1.1 with a bound on all that is no body: how much of it is kept, and how long it may take to arrive."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 10.0
LINGER_S = 5.0
"""How long a body that nobody wants may go on after its answer, so that the client gets to read that answer."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol; a peer that has shown no key yet can hold neither memory nor a socket for long."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._advanced = False
        self._idle_bytes = 0
        self._head_due: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that never sends a request is closed, too."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the timers go."""
        self._head_arrived()
        self._end_linger()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what arrives without ending a head or adding to a body: heads, trailers, chunk extensions, blanks."""
        self._advanced = False
        super().data_received(data)
        if self._advanced:
            self._idle_bytes = 0
            return
        self._idle_bytes += len(data)
        if self._idle_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"a request's head has at most {MAX_HEAD_BYTES} bytes", code="head_too_large"))

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the form of all other errors."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def on_message_begin(self) -> None:
        """A parser callback: the first byte of a request."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """A parser callback: the head is here."""
        self._advanced = True
        self._head_arrived()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A parser callback: a part of a body."""
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A parser callback: the body's end."""
        self._end_linger()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer has left. If the rest of its request's body is still on the way, wait for it, but not for long."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._linger = self.loop.call_later(LINGER_S, self.transport.close)

    def _expect_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_arrived(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _end_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _refuse(self, error: ApiError) -> None:
        """Answer past the application, and close."""
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
