"""One HTTP exchange of the generation endpoints: reading its body, and answering it once, in the right form."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from gateway.asgi import Receive, Scope, Send, header
from gateway.errors import ApiError
from gateway.openai.responses import sse
from gateway.request_record import Route
from kvcache.control import Finished
from kvcache.tracing import NO_SPAN, Span

Headers = list[tuple[bytes, bytes]]

BODY_TIMEOUT_S = 30.0
JSON: Headers = [(b"content-type", b"application/json")]
SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Routed(Protocol):
    """A request's life, as far as headers tell of it."""

    @property
    def route(self) -> Route:
        """The way that it took."""


class Exchange:
    """One response: remembers whether its head has left, so that an error takes the right form."""

    def __init__(self, path: str, request_id: str, send: Send, span: Span = NO_SPAN) -> None:
        self.path = path
        self.span = span
        self.request_id = request_id
        self.status = 499
        self.route = "none"
        self._send = send
        self._headers: Headers = [(b"x-request-id", request_id.encode())]
        self.complete = False
        self._streaming = False
        self._gone = False

    def took(self, life: Routed) -> None:
        """The way is known now: it goes into the headers."""
        route = life.route
        self.route = route.route
        self._headers += [
            (b"x-prfaas-route", route.route.encode()),
            (b"x-prfaas-route-reason", route.reason.encode()),
            (b"x-prfaas-prefill", route.prefill.encode()),
            (b"x-prfaas-kv-codec", route.codec.encode()),
        ]

    def add_headers(self, headers: Headers) -> None:
        """Say this, too, in the head of whatever answer it will be."""
        self._headers += headers

    def ended(self, done: Finished | None) -> None:
        """The answer is over; None where it did not end well."""
        if done is not None:
            usage = {"input_tokens": done.prompt_tokens, "output_tokens": done.completion_tokens}
            self.span.note({f"gen_ai.usage.{name}": count for name, count in usage.items()})

    def close_span(self) -> None:
        """The request is over, and what became of it is known."""
        self.span.note({"http.response.status_code": self.status, "prfaas.route": self.route})
        self.span.end("" if self.status < 500 else f"HTTP {self.status}")

    def gone(self) -> None:
        """The client went away."""
        self._gone = True
        if not self._streaming:
            self.status = 499

    async def open(self, headers: Headers) -> None:
        """Send the head of a stream."""
        self.status, self._streaming = 200, True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers + headers})

    async def write(self, data: bytes) -> None:
        """Send a part of a stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End a stream."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b""})

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response."""
        self.status, self.complete = status, True
        length = (b"content-length", str(len(body)).encode())
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*self._headers, *headers, length]}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error: a response of its own, or an event if the stream has begun; no ``[DONE]`` follows."""
        if self._gone:
            return
        if self._streaming:
            await self.write(sse(error.body()))
            await self.end()
            return
        await self.respond(error.status, [*JSON, *error.headers()], msgspec.json.encode(error.body()))


async def read_json(scope: Scope, receive: Receive, limit: int) -> bytes:
    """A body that must be there and be JSON, not yet parsed. Raises ApiError as ``read_body``, 411 and 415, too."""
    _check_form(scope)
    return await read_body(scope, receive, limit)


def _check_form(scope: Scope) -> None:
    """Raise ApiError for a body of unknown length, and for one that says it is no JSON."""
    coded = header(scope, b"content-encoding")
    if coded is not None and coded.lower() != "identity":
        text = "content-encoding: bodies are read as they are; send it unpacked"
        raise ApiError(415, text, code="unsupported_encoding")
    kind = (header(scope, b"content-type") or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "content-type: bodies are JSON; say application/json", code="unsupported_media_type")
    if header(scope, b"content-length") is None and header(scope, b"transfer-encoding") is None:
        raise ApiError(411, "content-length: say how long the body is, or send it in chunks", code="length_required")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body. Raises ApiError 413 beyond ``limit`` bytes, 408 where it does not come, 400 if cut off."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ApiError(400, "the body was cut off", code="body_cut_off")
                part = event.get("body", b"")
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
                if not event.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None
