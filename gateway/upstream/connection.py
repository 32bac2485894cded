"""One connection to an origin: one exchange at a time, its response framed strictly, back-pressure by not reading."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from gateway.upstream.errors import Cause, UpstreamError
from gateway.upstream.framing import BadChunk, BodySink, Chunked
from gateway.upstream.head import MAX_HEAD_BYTES, BadHead, ResponseHead, parse_head

MAX_INTERIM = 16
"""1xx responses before the final one."""
_JOINED_BYTES = 64 << 10
"""A body up to this size is copied behind its head, so that both leave at once."""


class Sink(BodySink, Protocol):
    """Who takes a response. After ``on_end`` or ``on_failure`` nothing more comes; after ``abandon`` neither does."""

    verbatim: bool
    """Whether whole chunks are wanted as they are."""

    def on_head(self, head: ResponseHead) -> None:
        """The final status and headers."""

    def flush(self) -> None:
        """All that came together with the head was handed over, so what waits to leave with it need not wait longer."""

    def on_end(self) -> None:
        """The body is whole."""

    def on_failure(self, error: UpstreamError) -> None:
        """There is nothing more to come."""


class Owner(Protocol):
    """Whoever counts connections."""

    def on_free(self, connection: Connection) -> None:
        """Its exchange is over and it can have another one."""

    def on_lost(self, connection: Connection) -> None:
        """It is gone. Called once, for every connection that was made."""


class Connection(asyncio.Protocol):
    """Not to be used by two exchanges at once: whoever has it from the pool calls ``start``."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since = 0.0
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head: ResponseHead | None = None
        self._buffer = b""
        self._interim = 0
        self._chunked: Chunked | None = None
        self._left: int | None = 0
        self._of_head_request = False
        self._answered = False
        self.paused = False
        """Whether nothing is read for now."""

    @property
    def connected(self) -> bool:
        """Whether it was made and is not lost yet: its owner still gets ``on_lost``."""
        return self._transport is not None

    @property
    def usable(self) -> bool:
        """Whether an exchange may begin here."""
        return self._sink is None and self._transport is not None and not self._transport.is_closing()

    def start(self, head: bytes, body: bytes, sink: Sink, deadline: float) -> None:
        """Send a request; its response goes to ``sink``, and must be whole by ``deadline``, the event loop's time."""
        transport = self._transport
        assert self._sink is None
        if transport is None or transport.is_closing():  # the other side may close what has just been made
            sink.on_failure(UpstreamError(Cause.CLOSED, "the connection was lost before it was used"))
            return
        self._sink, self._head, self._chunked, self._buffer = sink, None, None, b""
        self._interim, self._answered = 0, False
        self._of_head_request = head.startswith(b"HEAD ")
        self._timer = self._loop.call_at(deadline, self._late)
        if len(body) <= _JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def pause(self) -> None:
        """Read nothing more for now."""
        if not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Nobody wants the rest: close, which is how an engine learns that it can stop. Idempotent."""
        self._sink = None
        if self._chunked is not None:
            self._chunked.stop()
        self._end_timer()
        self._close()

    def give_up(self, why: str) -> None:
        """End the exchange as one that broke off: its sink hears of it."""
        self._fail(Cause.STALLED, why)

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, for whatever reason."""
        try:
            self._fail(Cause.CLOSED, "the connection was lost" if exc is None else str(exc)[:200])
        finally:
            self._transport = None
            self._owner.on_lost(self)

    def eof_received(self) -> None:
        """The other side sends nothing more. That ends a body which has no other end, and is a loss of any other."""
        if self._head is not None and self._chunked is None and self._left is None:
            self._finish(reusable=False)
        else:
            self._fail(Cause.CLOSED, "closed before the end of the response")

    def data_received(self, data: bytes) -> None:
        """Bytes of a response; where none is expected there must be none."""
        if self._chunked is not None:
            self._on_chunked(data)
        elif self._sink is None:
            self._close()
        elif self._head is None:
            self._answered = True
            self._on_head_bytes(data)
        else:
            self._on_plain(data)

    # ---- the response

    def _on_head_bytes(self, data: bytes) -> None:
        self._buffer += data
        while self._head is None and self._sink is not None:
            end = self._buffer.find(b"\r\n\r\n") + 4
            if end < 4 or end > MAX_HEAD_BYTES:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    self._fail(Cause.TOO_LARGE, f"a head of more than {MAX_HEAD_BYTES} bytes")
                return
            try:
                head = parse_head(self._buffer[:end], self._of_head_request)
            except BadHead as error:
                self._fail(Cause.PROTOCOL, f"head: {error}")
                return
            self._buffer = self._buffer[end:]
            if head.status >= 200:
                self._on_head(head)
                return
            self._interim += 1
            if self._interim > MAX_INTERIM:
                self._fail(Cause.PROTOCOL, f"more than {MAX_INTERIM} interim responses")

    def _on_head(self, head: ResponseHead) -> None:
        sink = self._sink
        assert sink is not None
        self._head, self._left = head, head.length
        rest, self._buffer = self._buffer, b""
        if head.chunked:
            self._chunked = Chunked(sink, sink.verbatim)
        sink.on_head(head)
        if self._sink is None:
            return
        if head.length == 0:
            self._finish(reusable=not rest)
        elif rest:
            self.data_received(rest)
        if self._sink is sink:
            sink.flush()

    def _on_chunked(self, data: bytes) -> None:
        assert self._chunked is not None
        try:
            rest = self._chunked.feed(data)
        except BadChunk as error:
            self._fail(Cause.PROTOCOL, f"chunk: {error}")
            return
        if rest is not None:
            self._finish(reusable=not rest)

    def _on_plain(self, data: bytes) -> None:
        sink, left = self._sink, self._left
        assert sink is not None
        if left is None:
            sink.on_data(data)
            return
        self._left = left - len(data)
        if self._left > 0:
            sink.on_data(data)
            return
        sink.on_data(data[:left])
        if self._sink is not None:
            self._finish(reusable=len(data) == left)

    # ---- its end

    def _finish(self, reusable: bool) -> None:
        sink, head, transport = self._sink, self._head, self._transport
        self._sink, self._chunked = None, None
        self._end_timer()
        if sink is None:
            return
        assert head is not None
        # a request that was answered before all of it was sent still has its rest in the way
        if reusable and head.keep_alive and transport is not None and not transport.get_write_buffer_size():
            self.resume()
            self._owner.on_free(self)
        else:
            self._close()
        sink.on_end()

    def _fail(self, cause: Cause, detail: str) -> None:
        sink = self._sink
        self._sink, self._chunked = None, None
        self._end_timer()
        self._close()
        if sink is not None:
            sink.on_failure(UpstreamError(cause, detail, sent=True, answered=self._answered))

    def _late(self) -> None:
        self._fail(Cause.DEADLINE, "the response was not whole in time")

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
