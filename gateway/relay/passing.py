"""One try at an engine: its response on the way to the client. Per chunk there is one call, one compare, one write."""

from __future__ import annotations

import asyncio
import re
from enum import Enum
from typing import Protocol

import msgspec

from gateway.errors import ApiError
from gateway.openai.responses import sse
from gateway.relay.headers import Header, to_client
from gateway.relay.usage import Usage, usage_in
from gateway.upstream.errors import Cause, UpstreamError
from gateway.upstream.framing import content_of
from gateway.upstream.head import ResponseHead
from scheduler.retrying import Failure, failure_of

MAX_ERROR_BYTES = 64 << 10
"""Of an answer that is held back because another try may do better."""
MAX_HELD_BYTES = 64 << 10
"""Of an event whose end has not come; a longer one passes in parts."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_EVENT = re.compile(rb".+?(?:\n\n|\r\n\r\n|\Z)", re.DOTALL)
_FRAMED_END = b"\n\n\r\n"
_DONE = b"data: [DONE]"
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_RETRYABLE = (Failure.BUSY, Failure.BROKEN, Failure.LATE)


class Receiver(Protocol):
    """The client's side, as far as a response needs it."""

    chunked: bool
    """Whether it understands chunks."""

    def begin(self, status: int, headers: list[Header], length: int | None) -> bytes:
        """The head of an answer, to be written first; without a length ``write`` takes what is framed already."""

    def write(self, data: bytes) -> None:
        """Bytes as they go on the wire."""


class End(Enum):
    """What a try came to."""

    WHOLE = "whole"
    """The client has it all."""
    BROKEN = "broken"
    """It began and broke off; the client was told, as far as it can be."""
    HELD = "held"
    """A failure that was said by a status; the client has seen nothing of it."""
    FAILED = "failed"
    """There was no response; the client has seen nothing."""


class Passing:
    """Takes one response from its connection. ``end`` is set when nothing more comes.

    ``strips_usage``: the event with usage was asked for by the gateway, and the client is not to see it.
    """

    verbatim = True

    def __init__(self, receiver: Receiver, loop: asyncio.AbstractEventLoop, strips_usage: bool) -> None:
        self.end: asyncio.Future[End] = loop.create_future()
        self.status = 0
        self.headers: list[Header] = []
        self.held = b""
        self.error: UpstreamError | None = None
        self.first_at: float | None = None
        self.events = 0
        self.pieces = 0
        self._receiver = receiver
        self._write = receiver.write
        self._loop = loop
        self._strips = strips_usage
        self._head = b""
        self._plain = False
        self._sse = False
        self._framed = False
        self._to_the_end = False
        self._holding = False
        self._last = b""
        self._before = b""

    @property
    def begun(self) -> bool:
        """Whether the client has seen anything of it."""
        return self.first_at is not None

    @property
    def failure(self) -> Failure | None:
        """What kind of failure it was, None if none."""
        if self.error is None:
            return failure_of(self.status)
        if self.error.cause is Cause.DEADLINE:
            return Failure.LATE
        return Failure.LOST if self.error.sent else Failure.NOT_SENT

    @property
    def retry_after_s(self) -> float | None:
        """What the engine asked for, where it did in seconds."""
        value = next((value for name, value in self.headers if name == b"retry-after"), b"")
        return float(value) if value.isdigit() and len(value) < 7 else None

    def usage(self) -> Usage | None:
        """What the engine said of it at its end."""
        return usage_in(self._before + self._last)

    # ---- what the connection calls

    def on_chunks(self, framed: bytes) -> None:
        """Whole chunks. Of a stream they pass untouched where they end with an event."""
        if self._plain and framed.endswith(_FRAMED_END):
            self._before, self._last = self._last, framed
            self.pieces += 1
            self.events += framed.count(b"data: ")
            self._write(framed)
        else:
            self.on_data(content_of(framed))

    def on_head(self, head: ResponseHead) -> None:
        """An answer begins, or a failure that another try may mend."""
        self.status, self.headers = head.status, to_client(head.headers)
        if failure_of(head.status) in _RETRYABLE or head.status in (401, 403):
            self._holding = True
            return
        kind = head.header(b"content-type") or b""
        self._sse = kind.startswith(b"text/event-stream")
        self._to_the_end = head.length is None and not head.chunked
        length = None if self._sse and self._strips else head.length  # less may pass than the engine says
        self._framed = length is None and self._receiver.chunked
        self.first_at = self._loop.time()
        self._head = self._receiver.begin(head.status, self.headers, length)

    def flush(self) -> None:
        """No more of the answer is here: its head leaves alone, unless it has left with a part of the body."""
        if self._head:
            self._say(b"")
        self._plain = self._sse and self._framed and not self.held and not self._strips

    def on_data(self, data: bytes) -> None:
        """A part of the content. Of a stream only whole events pass, so that it can be ended with one of ours."""
        if self._holding:
            self.held = (self.held + data)[:MAX_ERROR_BYTES]
            return
        self.pieces += 1
        if self._sse:
            data = self.held + data
            cut = max(data.rfind(end) + len(end) if end in data else 0 for end in _EVENT_ENDS)
            if not cut and len(data) > MAX_HELD_BYTES:
                cut = len(data)
            data, self.held = data[:cut], data[cut:]
            self._plain = self._framed and not self.held and not self._strips
            self._before, self._last = self._last, data
            self.events += data.count(b"data: ")
            if self._strips and _USAGE.search(data):
                data = _without_usage(data)
        else:
            self._before, self._last = self._last, data
        if data:
            self._say(_frame(data) if self._framed else data)

    def on_end(self) -> None:
        """The response is whole, unless it had no end but the connection's and says itself that it is not."""
        if self._holding:
            self._over(End.HELD)
        elif self._to_the_end and self._sse and _DONE not in self._before + self._last:
            self._break_off(UpstreamError(Cause.CLOSED, "closed without the last event", sent=True, answered=True))
        else:
            rest = _frame(self.held) if self.held and self._framed else self.held
            self._say(rest + b"0\r\n\r\n" if self._framed else rest)
            self._over(End.WHOLE)

    def on_failure(self, error: UpstreamError) -> None:
        """It broke off. What had begun ends with an event that says so; of a failure that was held, that is enough."""
        if self._holding:
            self._over(End.HELD)
        elif not self.begun:
            self.error = error
            self._over(End.FAILED)
        else:
            self._break_off(error)

    def _break_off(self, error: UpstreamError) -> None:
        self.error = error
        if self._sse:
            event = sse(broke_off(error).body())
            self._say(_frame(event) + b"0\r\n\r\n" if self._framed else event)
        else:
            self._say(b"")
        self._over(End.BROKEN)

    def _say(self, data: bytes) -> None:
        """Write, and with the first words the head."""
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self._write(data)

    def _over(self, end: End) -> None:
        if not self.end.done():
            self.end.set_result(end)

    @property
    def told(self) -> bool:
        """Whether a client can tell that a broken answer is broken without the connection's end."""
        return self._sse and self._framed


def broke_off(error: UpstreamError) -> ApiError:
    """What a client reads of an exchange that failed, whether or not its answer had begun."""
    if error.cause is Cause.DEADLINE:
        return ApiError(504, "the engine did not finish within the request's time", code="deadline")
    if error.answered:
        return ApiError(502, "the engine's answer broke off", code=f"engine_{error.cause.value}")
    text = "the engine could not be reached" if not error.sent else "the engine was lost before it answered"
    return ApiError(503, text, code=f"engine_{error.cause.value}", retry_after_s=1.0)


def is_error_object(body: bytes) -> bool:
    """Whether an engine's error is one that clients of OpenAI's API understand."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("error"), dict)


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _without_usage(events: bytes) -> bytes:
    """The events but for those that hold usage and no choice."""
    kept = [event for event in _EVENT.findall(events) if not (_NO_CHOICES.search(event) and _USAGE.search(event))]
    return b"".join(kept)
