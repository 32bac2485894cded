"""The two legs of one request as one operation: the failure of either ends the other, and nothing is left behind.

Until decode has spoken, prefill is part of the answer: its failure is the operation's. Afterwards it can no longer do
harm, and is only waited for where it knows something that the answer lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from gateway.dialects.errands import Errands
from gateway.dialects.leg import LegFailed, read_json, send
from gateway.dialects.legs import NOTHING
from gateway.dialects.patience import patience
from gateway.dialects.protocol import Dialect, Handoff, NoHandoff, Pair, Side
from gateway.dialects.spoken import Spoken
from gateway.upstream.pool import Pool
from scheduler.retrying import Failure

T = TypeVar("T")

LEASE_SHARE = 0.8
"""Of a lease, until decode must have begun: the engines' clocks and this one began at different times."""
AFTERWARDS_S = 1.0
"""How long a prefill engine's words are waited for once the answer is there without them."""


@dataclass(frozen=True, slots=True)
class Until:
    """By the event loop's clock: when prefill must have answered and a stream have begun, and when all must be over.

    ``begun`` is asked again when it is reached: an engine that was given more meanwhile may take longer.
    """

    begun: Callable[[], float]
    over: float

    def late(self) -> float:
        """When it is too late to begin, as far as can be said now."""
        return min(self.begun(), self.over)


class TwoLegs:
    """Prefill on one engine, decode on another."""

    def __init__(
        self,
        pool: Pool,
        errands: Errands,
        dialect: Dialect,
        pair: Pair,
        until: Until,
        heard: Callable[[Handoff], None],
        stand_in: Side | None = None,
    ) -> None:
        """``heard`` is called with what prefill answers.

        ``stand_in`` is another decode engine: where the pair's own cannot be reached, it tells prefill to let go.
        """
        self.pair = pair
        self._stand_in = stand_in
        self._unreached = False
        self.prefilled_at: float | None = None
        self._pool = pool
        self._errands = errands
        self._dialect = dialect
        self._until = until
        self._deadline = until.over
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._streams = bool(pair.body.get("stream"))
        self._handoff: Handoff | None = None
        self._prefilling: asyncio.Task[Handoff] | None = None
        self._decoding: asyncio.Task[Spoken] | None = None
        self._spoken: Spoken | None = None
        self._closed = False

    async def begin(self) -> None:
        try:
            self._prefilling = _watched(self._prefill())
            if not self._dialect.concurrent:
                await self._prefilling
            self._decoding = _watched(self._decode())
            self._spoken = await self._first_of_both(self._prefilling, self._decoding)
        except BaseException:
            self.close()
            await asyncio.wait({task for task in (self._prefilling, self._decoding) if task is not None})
            raise

    def events(self) -> AsyncIterator[bytes]:
        assert self._spoken is not None
        return self._spoken.events()

    async def whole(self) -> dict[str, Any]:
        assert self._spoken is not None
        return self._spoken.answer

    async def handed_off(self) -> Handoff:
        if self._handoff is None and self._prefilling is not None:
            await asyncio.wait({self._prefilling}, timeout=AFTERWARDS_S)
        return self._handoff or NOTHING

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in (self._prefilling, self._decoding):
            if task is not None:
                task.cancel()
        if self._spoken is not None:
            self._spoken.close()
        else:
            pair = self.pair
            if self._unreached and self._stand_in is not None:
                pair = replace(pair, decode=self._stand_in)
            self._errands.run(pair.request_id, self._dialect.let_go(pair, self._handoff))

    async def _first_of_both(self, prefilling: asyncio.Task[Handoff], decoding: asyncio.Task[Spoken]) -> Spoken:
        """Decode's beginning. Raises what ends either of them before."""
        while not decoding.done():
            waiting: set[asyncio.Task[Any]] = {decoding} if prefilling.done() else {decoding, prefilling}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if prefilling.done() and not decoding.done():
                prefilling.result()
        return decoding.result()

    async def _prefill(self) -> Handoff:
        ask, pair = self._dialect.prefill(self.pair), self.pair
        try:
            async with patience(self._until.late):
                left = self._deadline - self._loop.time()
                response = await send(self._pool, "prefill", pair.prefill, ask, pair.request_id, left)
                answer = await read_json(response, "prefill")
        except TimeoutError:
            raise LegFailed("prefill", "late", Failure.LATE) from None
        self.prefilled_at = self._loop.time()
        try:
            self._handoff = self._dialect.handoff(pair, answer)
        except NoHandoff as error:
            raise LegFailed("prefill", error.cause, Failure.BROKEN, faulty=error.faulty) from error
        self._heard(self._handoff)
        return self._handoff

    async def _decode(self) -> Spoken:
        """Ask, and read the beginning. KV that lies at prefill under a lease is only gone on with while it is sure."""
        ask, pair = self._dialect.decode(self.pair, self._handoff), self.pair
        engine, ends = pair.prefill.engine, inf
        if engine.dialect.has_lease and self.prefilled_at is not None:
            ends = self.prefilled_at + LEASE_SHARE * engine.lease_s
            if self._loop.time() >= ends:
                raise LegFailed("decode", "lease_expired", Failure.LATE, faulty=False)
        spoken: Spoken | None = None
        try:
            async with patience(lambda: min(self._until.late(), ends) if self._streams else self._deadline):
                left = self._deadline - self._loop.time()
                response = await send(self._pool, "decode", pair.decode, ask, pair.request_id, left)
                spoken = Spoken(response, self._streams)
                await spoken.begin()
                return spoken
        except TimeoutError:
            _close(spoken)
            stale = self._loop.time() >= ends
            raise LegFailed("decode", "lease_expired" if stale else "late", Failure.LATE, faulty=not stale) from None
        except BaseException as error:
            self._unreached = isinstance(error, LegFailed) and error.kind is Failure.NOT_SENT
            _close(spoken)
            raise


def _watched(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose failure may go unheard: the other leg's was first."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _close(spoken: Spoken | None) -> None:
    if spoken is not None:
        spoken.close()
