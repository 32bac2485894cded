"""The events of decode engines as their client gets them: usage made right, choices numbered through, one end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from gateway.dialects.fields import wants_prompt_logprobs
from gateway.dialects.leg import LegFailed, error_status
from gateway.dialects.legs import Legs
from gateway.dialects.parts import Part, joined_usage
from gateway.dialects.protocol import Dialect
from gateway.dialects.sse import DONE, data_of, payload_of
from scheduler.retrying import Failure

END = b"data: [DONE]\n\n"
_TOLD = re.compile(rb'"usage"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"([a-z_]{1,40})"')
_AHEAD = 64
"""Events of all parts that may wait for the client."""


class StreamJoin:
    """One client's stream. ``legs`` have begun; ``dialect`` is None for a request that stays whole."""

    def __init__(self, body: Any, legs: Sequence[Legs], of: tuple[Part, ...], dialect: Dialect | None) -> None:
        options = body.get("stream_options")
        self._body = body
        self._legs = legs
        self._parts = of
        self._dialect = dialect
        self._wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._every_event = len(of) > 1 or (dialect is not None and wants_prompt_logprobs(body))
        self._usages: list[dict[str, Any] | None] = [None] * len(of)
        self._seen: set[tuple[int, int]] = set()
        self._named: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self.finish: str | None = None
        self.events = 0
        """So many carried choices."""

    @property
    def usage(self) -> dict[str, Any] | None:
        """Of the whole answer, once every part has told its own."""
        return joined_usage(list(self._usages), self._parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """What the client gets. Raises LegFailed where an answer breaks off."""
        ended = set()
        async for at, event in self._all():
            if data_of(event).strip() == DONE:
                ended.add(at)
                continue
            made = await self._made(at, event)
            if made:
                yield made
        if len(ended) < len(self._legs):
            raise LegFailed("decode", "cut_off", Failure.LOST)
        usage = self.usage
        if self._wants_usage and usage is not None:
            yield _event(self._last | {"choices": [], "usage": usage})
        yield END

    async def _made(self, at: int, event: bytes) -> bytes:
        finish = _FINISH.search(event)
        if finish is not None:
            self.finish = finish[1].decode()
        told = _TOLD.search(event) is not None
        if not told and not self._every_event and b'"error"' not in event:
            self.events += 1
            return event
        try:
            payload = payload_of(event)
        except ValueError as error:
            raise LegFailed("decode", "no_json", Failure.BROKEN) from error
        if payload is None:
            return event
        if "choices" not in payload and error_status(payload) is not None:
            raise LegFailed("decode", "error_in_stream", Failure.BROKEN, status=error_status(payload) or 500)
        return await self._joined(at, payload)

    async def _joined(self, at: int, payload: dict[str, Any]) -> bytes:
        choices = payload.get("choices") or []
        keys = {(at, choice.get("index", 0)) for choice in choices}
        first = not keys <= self._seen
        self._seen |= keys
        usage = payload.get("usage")
        if self._dialect is not None and (first or usage):
            self._dialect.join(self._body, payload, await self._legs[at].handed_off(), first)
            usage = payload.get("usage")
        if isinstance(usage, dict):
            self._usages[at] = usage
        if not choices and isinstance(usage, dict):
            self._last = payload | self._named
            return b""
        self.events += 1
        if len(self._parts) > 1:
            part = self._parts[at]
            for choice in choices:
                choice["index"] = part.offset + choice.get("index", 0) * part.stride
            if not self._named:
                self._named = {name: payload[name] for name in ("id", "created") if name in payload}
            payload |= self._named
            if usage:
                payload["usage"] = None  # what this part has spoken so far says nothing of the others
        return _event(payload)

    async def _all(self) -> AsyncIterator[tuple[int, bytes]]:
        """The events of all parts as they come. Raises what ends any of them."""
        if len(self._legs) == 1:
            async for event in self._legs[0].events():
                yield 0, event
            return
        queue: asyncio.Queue[tuple[int, bytes | Exception | None]] = asyncio.Queue(_AHEAD)
        tasks = [asyncio.create_task(_pump(at, legs, queue)) for at, legs in enumerate(self._legs)]
        try:
            left = len(tasks)
            while left:
                at, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield at, found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(at: int, legs: Legs, queue: asyncio.Queue[tuple[int, bytes | Exception | None]]) -> None:
    """One part's events, then None, or what ended it."""
    try:
        async for event in legs.events():
            await queue.put((at, event))
    except Exception as error:
        await queue.put((at, error))
    else:
        await queue.put((at, None))


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
