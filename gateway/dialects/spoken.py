"""What a decode engine answers: a stream from its first event on, or a whole answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from gateway.dialects.leg import LegFailed, broken, error_status, read_json
from gateway.dialects.sse import Cutter, EventTooLarge, data_of, payload_of
from gateway.upstream.errors import UpstreamError
from gateway.upstream.response import Response
from scheduler.retrying import Failure


class Spoken:
    """One answer. Call ``begin``, and ``close`` in any case."""

    def __init__(self, response: Response, streams: bool) -> None:
        self._response = response
        self._streams = streams
        self._parts = response.body
        self._cutter = Cutter()
        self._first: list[bytes] = []
        self.answer: dict[str, Any] = {}

    async def begin(self) -> None:
        """Read up to the first event that is no comment, or all. Raises LegFailed, also for an error instead."""
        if not self._streams:
            self.answer = await read_json(self._response, "decode")
            _check(self.answer)
            return
        try:
            while not any(data_of(event) for event in self._first):
                part = await anext(self._parts, None)
                if part is None:
                    raise LegFailed("decode", "empty_stream", Failure.BROKEN)
                self._first += self._cutter.feed(part)
            for event in self._first:
                _check(payload_of(event) or {})
        except UpstreamError as error:
            raise broken("decode", error) from error
        except ValueError as error:
            raise LegFailed("decode", "no_json", Failure.BROKEN) from error

    async def events(self) -> AsyncIterator[bytes]:
        """All events, the first one again."""
        for event in self._first:
            yield event
        try:
            async for part in self._parts:
                for event in self._cutter.feed(part):
                    yield event
        except UpstreamError as error:
            raise broken("decode", error) from error
        except EventTooLarge as error:
            raise LegFailed("decode", "event_too_large", Failure.BROKEN) from error
        if self._cutter.rest.strip():
            raise LegFailed("decode", "cut_off", Failure.LOST)

    def close(self) -> None:
        """Give up the rest."""
        self._response.close()


def _check(payload: dict[str, Any]) -> None:
    status = error_status(payload)
    if status is not None:
        raise LegFailed("decode", "error_in_stream", Failure.BROKEN, status=status)
