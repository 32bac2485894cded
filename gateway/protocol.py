"""HTTP/1.1 with a bound on all that is no body: how much of it is kept, and how long it may take to arrive.

Requests to generate are answered from here, past ASGI; all others go uvicorn's way.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Protocol, cast
from urllib.parse import unquote_to_bytes

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.asgi import Scope
from gateway.caller import Caller
from gateway.errors import ApiError
from gateway.hot import ENDPOINTS
from gateway.pace import Pace
from gateway.relay.headers import lines

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 10.0
_ANSWERED_HERE = frozenset(path.encode() for path in ENDPOINTS)
LINGER_S = 5.0
"""How long a body that nobody wants may go on after its answer, so that the client gets to read that answer."""


class Answers(Protocol):
    """Whoever answers requests to generate: the application's ``answers``."""

    @property
    def max_body_bytes(self) -> int:
        """What a body may have."""

    async def serve(self, caller: Caller) -> None:
        """Answer one. Cancelled when its client is gone."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol; a peer that has shown no key yet can hold neither memory nor a socket for long."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._advanced = False
        self._idle_bytes = 0
        self._head_due: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._answers: Answers = self.config.app.answers  # type: ignore[union-attr]
        self._relaying: Caller | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that never sends a request is closed, too."""
        super().connection_made(transport)
        self.pace = Pace(transport, self.loop)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the timers go."""
        self._head_arrived()
        self._end_linger()
        self.pace.end()
        caller = self._relaying
        super().connection_lost(exc)
        if caller is not None:
            caller.on_gone()

    def pause_writing(self) -> None:
        """The client does not read what waits for it."""
        super().pause_writing()
        self.pace.on_full()
        if self._relaying is not None:
            self._relaying.on_full()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self.pace.on_drained()
        if self._relaying is not None:
            self._relaying.on_drained()

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
        path = self._path_answered_here()
        if path is None:
            super().on_headers_complete()
        else:
            self._answer(path)

    def on_body(self, body: bytes) -> None:
        """A parser callback: a part of a body."""
        self._advanced = True
        if isinstance(self.cycle, Caller):
            self.cycle.on_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A parser callback: the body's end."""
        self._end_linger()
        if isinstance(self.cycle, Caller):
            self.cycle.on_body_end()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer has left. If the rest of its request's body is still on the way, wait for it, but not for long."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._linger = self.loop.call_later(LINGER_S, self.pace.close)

    def timeout_keep_alive_handler(self) -> None:
        """No other request came for long."""
        self.pace.close()

    # ---- requests to generate

    def default_lines(self) -> bytes:
        """Header lines of every answer."""
        return lines(self.server_state.default_headers)

    def relaying(self, caller: Caller | None) -> None:
        """Whose answer is being written: it hears of the client's leaving and of a full buffer."""
        self._relaying = caller

    def _path_answered_here(self) -> str | None:
        """The path of a request to generate; None for all others."""
        if self.parser.get_method() != b"POST" or (self.parser.should_upgrade() and self._should_upgrade()):
            return None
        path = self.url
        if path not in _ANSWERED_HERE:
            path = httptools.parse_url(path).path
            if b"%" in path:
                path = unquote_to_bytes(path)
        return path.decode() if path in _ANSWERED_HERE else None

    def _answer(self, path: str) -> None:
        """What uvicorn does where a head ends, with a caller in its cycle's place."""
        version = self.parser.get_http_version()
        scope = cast(Scope, self.scope)
        scope.update(method="POST", path=path, raw_path=path.encode(), query_string=b"", http_version=version)
        before = self.cycle
        caller = Caller(
            self,
            self._answers.serve,
            scope,
            self._answers.max_body_bytes,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            chunked=version != "1.0",
            waits_for_100=self.expect_100_continue,
        )
        self.cycle = caller  # type: ignore[assignment]
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # pipelined: its turn comes when the answer before it has left
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    # ---- bounds

    def _expect_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_TIMEOUT_S, self.pace.close)

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
