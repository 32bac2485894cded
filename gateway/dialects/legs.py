"""What an answer is read from, whether one engine gives it or two; and the one of a request that stays whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from gateway.dialects.leg import send
from gateway.dialects.protocol import Ask, Handoff, Side
from gateway.dialects.spoken import Spoken
from gateway.upstream.pool import Pool

NOTHING = Handoff()


class Legs(Protocol):
    """What an answer is read from: two legs, or the one of a request that stays whole."""

    prefilled_at: float | None
    """When the prefill engine had answered, by the event loop's clock."""

    async def begin(self) -> None:
        """Return when the answer has begun. Raises LegFailed, and has then let go of everything."""

    def events(self) -> AsyncIterator[bytes]:
        """The events of a stream. Raises LegFailed where it breaks off."""

    async def whole(self) -> dict[str, Any]:
        """The answer that is no stream, as it was read by ``begin``."""

    async def handed_off(self) -> Handoff:
        """What the prefill engine said; nothing where it has not."""

    def close(self) -> None:
        """Let go of everything, well ended or not. Idempotent."""


class Whole:
    """A request that one engine serves alone."""

    prefilled_at: float | None = None

    def __init__(self, pool: Pool, side: Side, ask: Ask, request_id: str, deadline: float) -> None:
        self._pool = pool
        self._side = side
        self._ask = ask
        self._request_id = request_id
        self._deadline = deadline
        self._spoken: Spoken | None = None

    async def begin(self) -> None:
        left = self._deadline - asyncio.get_running_loop().time()
        response = await send(self._pool, "decode", self._side, self._ask, self._request_id, left)
        self._spoken = Spoken(response, bool(self._ask.body.get("stream")))
        try:
            await self._spoken.begin()
        except BaseException:
            self._spoken.close()
            raise

    def events(self) -> AsyncIterator[bytes]:
        assert self._spoken is not None
        return self._spoken.events()

    async def whole(self) -> dict[str, Any]:
        assert self._spoken is not None
        return self._spoken.answer

    async def handed_off(self) -> Handoff:
        return NOTHING

    def close(self) -> None:
        if self._spoken is not None:
            self._spoken.close()
