"""The client's side of a request to generate: its body in, one answer out, past ASGI in place of uvicorn's cycle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from gateway.asgi import Scope
from gateway.bodies import BODY_TIMEOUT_S, announced_too_large, too_large, too_slow
from gateway.eager import Eager
from gateway.errors import ApiError
from gateway.fleet.config import EngineConfig
from gateway.openai.responses import sse
from gateway.pace import Pace
from gateway.relay.headers import Header, lines
from gateway.request_record import Route
from kvcache.tracing import NO_SPAN, Span

log = logging.getLogger(__name__)

JSON = ((b"content-type", b"application/json"),)
_SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class _Unheard:
    """In place of the event that uvicorn sets for who waits in ``receive``."""

    def set(self) -> None:
        """Nobody waits."""


_NOBODY_WAITS = _Unheard()


class Connected(Protocol):
    """The connection that a request came on."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    pace: Pace

    def default_lines(self) -> bytes:
        """Header lines of every answer."""

    def relaying(self, caller: Caller | None) -> None:
        """Whose answer is being written: it hears of the client's leaving and of a full buffer."""

    def on_response_complete(self) -> None:
        """An answer has left whole."""


class Caller:
    """One request. uvicorn's protocol keeps it where it keeps its own cycles, and reads the public attributes."""

    def __init__(
        self,
        connection: Connected,
        serve: Callable[[Caller], Any],
        scope: Scope,
        limit: int,
        keep_alive: bool,
        chunked: bool,
        waits_for_100: bool,
    ) -> None:
        self.scope = scope
        self.path: str = scope["path"]
        self.connection = connection
        self.keep_alive = keep_alive
        self.chunked = chunked
        self.waits_for_100 = waits_for_100
        self.more_body = True
        self.disconnected = False
        self.response_complete = False
        self.message_event = _NOBODY_WAITS
        self.request_id = ""
        self.route = "none"
        self.extra: list[Header] = []
        """Headers of the answer besides the engine's."""
        self.told: list[Header] = []
        """What every answer says beside that: what is left to use, who may read it."""
        self.span: Span = NO_SPAN
        self.status = 499
        self.begun = False
        self._serve = serve
        self._limit = limit
        self._body: list[bytes] = []
        self._size = 0
        self._arrived: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | Eager | None = None
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._transport = connection.transport

    async def run_asgi(self, app: Any) -> None:
        """What uvicorn starts when it is this request's turn."""
        if self.disconnected:
            return
        self._task = asyncio.current_task()
        await self._run()

    def start(self, tasks: set[Any]) -> None:
        """Serve it from now on, without a task; ``tasks`` has what runs until it is over.

        What asks for the current task, as time-outs do, must be run in one of its own.
        """
        eager = self._task = Eager(self._run(), tasks.discard)
        tasks.add(eager)
        eager.start()

    async def _run(self) -> None:
        self.connection.relaying(self)
        try:
            if self.connection.pace.full:  # answers before this one are not read yet: no more is added to them
                await self.room()
            await self._serve(self)
        except asyncio.CancelledError:
            if not self.disconnected:
                raise
        except Exception:
            log.exception("request broke id=%s", self.request_id)
            self.give_up(ApiError(500, "internal error", code="internal_error"))
        finally:
            self.connection.relaying(None)

    # ---- its body

    def on_body(self, part: bytes) -> None:
        """A part of the body; what is beyond the limit is dropped."""
        self._size += len(part)
        if self._size <= self._limit:
            self._body.append(part)
        elif self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def on_body_end(self) -> None:
        """The body is whole."""
        self.more_body = False
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def body(self) -> bytes:
        """The whole body. Raises ApiError 413 where it is too large, 408 where it does not come."""
        if announced_too_large(self.scope, self._limit):
            raise too_large(self._limit)
        if self.more_body and self._size <= self._limit:
            if self.waits_for_100:
                self.waits_for_100 = False
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            loop = self.connection.loop
            self._arrived = loop.create_future()
            timer = loop.call_later(BODY_TIMEOUT_S, self._body_due)
            try:
                await self._arrived
            finally:
                timer.cancel()
        if self._size > self._limit:
            raise too_large(self._limit)
        whole = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        return whole

    def put_back(self, body: bytes) -> None:
        """Let ``body`` return it once more, to whoever needs it next; until then it is kept here alone."""
        self._body = [body]

    def _body_due(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(too_slow())

    # ---- its answer

    def write(self, data: bytes) -> None:
        """Bytes as they go on the wire, dropped where it is closed: its client may be gone before that is said here."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def named(self, request_id: str) -> None:
        """How the request is called: its client and the engine are told."""
        self.request_id = request_id
        self.extra = [(b"x-request-id", request_id.encode())]

    def goes_to(self, engine: EngineConfig, local: bool) -> None:
        """The way is known: its client is told."""
        self.route = "local" if local else f"remote:{engine.cluster}"
        way = ((b"x-prfaas-route", self.route.encode()), (b"x-prfaas-engine", engine.name.encode()))
        self.extra = [*self.extra[:1], *way]

    def took(self, route: Route) -> None:
        """The same of a request that is split here."""
        self.route = route.route
        self.extra = [
            *self.extra[:1],
            (b"x-prfaas-route", route.route.encode()),
            (b"x-prfaas-route-reason", route.reason.encode()),
            (b"x-prfaas-prefill", route.prefill.encode()),
            (b"x-prfaas-kv-codec", route.codec.encode()),
        ]

    def begin(self, status: int, headers: Iterable[Header], length: int | None) -> bytes:
        """The head of an answer, to be written now. Without a length its body is chunked, or ends with the connection.

        It is handed back, so that what is there of the body can leave with it.
        """
        self.status, self.begun = status, True
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing, self.keep_alive = b"", False
        return self._head(status, headers, framing)

    def stream(self) -> None:
        """Begin an answer of events; ``send`` and ``end`` follow."""
        self.write(self.begin(200, _SSE, None))

    def send(self, data: bytes) -> None:
        """Events of it."""
        self.write(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)

    def end(self, data: bytes) -> None:
        """The last of them, if any are left."""
        if data:
            self.send(data)
        if self.chunked:
            self.write(b"0\r\n\r\n")
        self.finish()

    def respond(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """A whole answer."""
        self.status, self.begun = status, True
        self.write(self._head(status, headers, b"content-length: %d\r\n" % len(body)) + body)
        self.finish()

    def refuse(self, error: ApiError) -> None:
        """An answer of the gateway's own: an event where a stream has begun. Nothing for a client that is gone."""
        if self.disconnected or self.response_complete:
            return
        if self.begun:
            self.end(sse(error.body()))
        else:
            self.respond(error.status, (*JSON, *error.headers()), msgspec.json.encode(error.body()))

    def finish(self) -> None:
        """The answer has been written to its end."""
        self.response_complete = True
        if not self.keep_alive:
            self.connection.pace.close()
        self.connection.on_response_complete()

    def give_up(self, error: ApiError) -> None:
        """An error of the gateway's own, whether or not anything was said yet."""
        if self.begun:
            self.cut()
        else:
            self.refuse(error)

    def cut(self) -> None:
        """The answer cannot be ended as it began: let the client see that by the connection's end."""
        self.response_complete = True
        self.connection.pace.close()
        self.connection.on_response_complete()

    def drop(self) -> None:
        """It does not read: what waits for it is thrown away with its connection."""
        self.response_complete = True
        self.connection.transport.abort()

    def _head(self, status: int, headers: Iterable[Header], framing: bytes) -> bytes:
        first = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
        last = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        named = lines([*self.extra, *self.told, *headers])
        return b"".join((first, self.connection.default_lines(), named, framing, last))

    # ---- its client's pace

    def flows(self, pause: Callable[[], None] | None, resume: Callable[[], None] | None) -> None:
        """How whatever writes here can be stopped while the client does not read, and let go again."""
        self._pause, self._resume = pause, resume
        if pause is not None and self.connection.pace.full:
            pause()

    def on_full(self) -> None:
        """Too much waits for the client."""
        if self._pause is not None:
            self._pause()

    def on_drained(self) -> None:
        """It reads."""
        if self._resume is not None:
            self._resume()
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    async def room(self) -> None:
        """Return when more may be written. Who cannot be stopped between two writes uses ``flows``."""
        if self.connection.pace.full:
            self._emptied = self.connection.loop.create_future()
            await self._emptied

    def on_gone(self) -> None:
        """It left: whatever is done for it ends."""
        self.disconnected = True
        if self._task is not None and not self.response_complete:
            self._task.cancel()
