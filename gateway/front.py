"""Connections of clients: ordinary requests to generate are read here, with few calls, and the rest is uvicorn's.

Ordinary is a head that comes in one piece, of HTTP/1.1, with a body framed by its length. A connection that says
anything else becomes one of uvicorn's protocol, from the first byte of that request on, and stays one.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway import protocol
from gateway.asgi import Scope
from gateway.caller import Caller
from gateway.hot import ENDPOINTS
from gateway.pace import Pace
from gateway.protocol import MAX_HEAD_BYTES, Answers, BoundedHttp
from gateway.relay.headers import Header, lines

MAX_AHEAD_BYTES = 64 << 10
"""Of what a client says before the answer to its request: then it is read no further until that answer has left."""
_ORDINARY = re.compile(b"POST (%s) HTTP/1\\.1\r\n" % "|".join(map(re.escape, ENDPOINTS)).encode())
_LENGTH = b"content-length"
_UNUSUAL = frozenset({b"transfer-encoding", b"expect"})
_MAX_LENGTH_DIGITS = 18


class Front(asyncio.Protocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._answers: Answers = config.app.answers  # type: ignore[union-attr]
        self._caller: Caller | None = None
        self._missing = 0
        """Bytes of the request's body that are still to come."""
        self._ahead = b""
        """What was said behind the request."""
        self._due: asyncio.TimerHandle | None = None

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection that never sends a request is closed."""
        self.transport = cast(asyncio.Transport, transport)
        self.pace = Pace(self.transport, self.loop)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._close_in(protocol.HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever is done for the client ends."""
        self._state.connections.discard(self)
        self._stay()
        self.pace.end()
        if self._caller is not None:
            self._caller.on_gone()

    def data_received(self, data: bytes) -> None:
        """A request, a part of its body, or what is said ahead of its answer."""
        if self._missing:
            self._on_body(data)
        elif self._caller is None and not self._ahead:
            self._on_request(data)
        else:
            self._ahead += data
            if len(self._ahead) > MAX_AHEAD_BYTES:
                self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The client does not read what waits for it."""
        self.pace.on_full()
        if self._caller is not None:
            self._caller.on_full()

    def resume_writing(self) -> None:
        """It does again."""
        self.pace.on_drained()
        if self._caller is not None:
            self._caller.on_drained()

    # ---- a request

    def _on_request(self, data: bytes) -> None:
        path = _ORDINARY.match(data)
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
        head = None if path is None or end < 4 else _read(data[:end])
        if path is None or head is None:
            self._to_uvicorn(data)
            return
        self._stay()
        scope = self._scope(path[1], head.headers)
        answers = self._answers
        caller = self._caller = Caller(
            self, answers.serve, scope, answers.max_body_bytes, head.keep_alive, chunked=True, waits_for_100=False
        )
        self._missing = head.length
        self._on_body(data[end:])
        caller.start(self._state.tasks)

    def _on_body(self, data: bytes) -> None:
        missing = self._missing
        if len(data) > missing:
            data, self._ahead = data[:missing], data[missing:]
        self._missing = missing = missing - len(data)
        caller = self._caller
        if caller is not None:
            caller.on_body(data)
            if not missing:
                caller.on_body_end()
        elif not missing:  # it was answered before
            self._next()

    def _scope(self, path: bytes, headers: list[Header]) -> Scope:
        """As uvicorn makes it, without what only the application asks for."""
        return {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path.decode(),
            "raw_path": path,
            "query_string": b"",
            "headers": headers,
            "client": self.transport.get_extra_info("peername"),
        }

    def _next(self) -> None:
        """All of a request and its answer is over."""
        if self._ahead:
            self.loop.call_soon(self._on_ahead)
        else:
            self._close_in(self._config.timeout_keep_alive)

    def _on_ahead(self) -> None:
        if not self.transport.is_closing():
            data, self._ahead = self._ahead, b""
            self.transport.resume_reading()
            self._on_request(data)

    # ---- what its caller asks

    def default_lines(self) -> bytes:
        """Header lines of every answer."""
        return lines(self._state.default_headers)

    def relaying(self, caller: Caller | None) -> None:
        """Known: whose request it is hears of all."""

    def on_response_complete(self) -> None:
        """An answer has left. If the rest of its request's body is still on the way, wait for it, but not for long."""
        self._state.total_requests += 1
        self._caller = None
        if self.transport.is_closing():
            return
        if self._missing:
            self._close_in(protocol.LINGER_S)
        else:
            self._next()

    # ---- what uvicorn asks

    def shutdown(self) -> None:
        """The server ends: so does the connection, after the answer that is under way."""
        if self._caller is None:
            self.pace.close()
        else:
            self._caller.keep_alive = False

    def _to_uvicorn(self, data: bytes) -> None:
        self._stay()
        self.pace.end()
        self._state.connections.discard(self)
        full = BoundedHttp(self._config, self._state, self._app_state, self.loop)
        full.connection_made(self.transport)
        if self.pace.full:
            full.pause_writing()
        self.transport.set_protocol(full)
        full.data_received(data)

    # ---- how long it may be kept

    def _close_in(self, seconds: float) -> None:
        self._stay()
        self._due = self.loop.call_later(seconds, self.pace.close)

    def _stay(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


class _Head:
    """What httptools calls back with, and what of that matters here."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.length = 0
        self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def _read(data: bytes) -> _Head | None:
    """A request's head up to its blank line; None where it is wrong, or unusual in what frames its body."""
    head = _Head()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # an offer, as some clients make of HTTP/2 with every request: it need not be taken up
    except httptools.HttpParserError:
        return None
    found = dict(head.headers)
    length = found.get(_LENGTH, b"")
    if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS or not _UNUSUAL.isdisjoint(found):
        return None
    head.length, head.keep_alive = int(length), parser.should_keep_alive()
    return head
