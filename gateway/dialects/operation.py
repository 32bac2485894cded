"""The two legs of one request as one operation: the failure of either ends the other, and nothing is left behind.

Until decode has spoken, prefill is part of the answer: its failure is the operation's. Afterwards it can no longer do
harm, and is only waited for where it knows something that the answer lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol, TypeVar

from gateway.dialects.leg import LegFailed, broken, error_status, read_json, send
from gateway.dialects.protocol import Ask, Dialect, Handoff, NoHandoff, Pair, Side
from gateway.dialects.sse import Cutter, EventTooLarge, data_of, payload_of
from gateway.upstream.errors import UpstreamError
from gateway.upstream.pool import Pool
from gateway.upstream.response import Response
from scheduler.retrying import Failure

T = TypeVar("T")

LEASE_SHARE = 0.8
"""Of a lease, until decode must have begun: the engines' clocks and this one began at different times."""
AFTERWARDS_S = 1.0
"""How long a prefill engine's words are waited for once the answer is there without them."""
LETTING_GO_S = 2.0
ASK_AGAIN_S = 0.01
"""Before something counts as late it is looked whether it still does."""
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


class Spoken:
    """The decode engine's answer: a stream from its first event on, or a whole answer."""

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


class Errands:
    """Requests that nobody waits for: telling engines to let go. Bounded, each with a deadline."""

    def __init__(self, pool: Pool, most: int = 256) -> None:
        self._pool = pool
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, request_id: str, asks: tuple[tuple[Side, Ask], ...]) -> None:
        """Send them; what comes of it changes nothing."""
        for side, ask in asks[: max(0, self._most - len(self._tasks))]:
            self._keep(self._send(request_id, side, ask))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request_id: str, side: Side, ask: Ask) -> None:
        try:
            async with await send(self._pool, "let_go", side, ask, request_id, LETTING_GO_S):
                pass
        except LegFailed:
            return  # an engine that cannot be told frees by its own clock


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


@asynccontextmanager
async def patience(ends: Callable[[], float]) -> AsyncIterator[None]:
    """Raise TimeoutError once it is as late as ``ends`` says, which is asked again by then."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout_at(ends()) as limit:
        timer: asyncio.TimerHandle

        def arm() -> None:
            nonlocal timer
            timer = loop.call_at((limit.when() or 0.0) - ASK_AGAIN_S, look)

        def look() -> None:
            later = ends()
            if later > (limit.when() or 0.0):
                limit.reschedule(later)
                arm()

        arm()
        try:
            yield
        finally:
            timer.cancel()


def _watched(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose failure may go unheard: the other leg's was first."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _close(spoken: Spoken | None) -> None:
    if spoken is not None:
        spoken.close()
