"""One request that was let in: its turn, its tries at engines, and what its client reads if none succeeds."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import msgspec

from gateway.caller import Caller
from gateway.errors import ApiError
from gateway.fleet.engine import Engine, Use
from gateway.relay.engines import Heads, pick
from gateway.relay.figures import RelayFigures
from gateway.relay.passing import End, Passing, broke_off, is_error_object
from gateway.relay.places import Places, Where
from gateway.upstream.connection import Connection
from gateway.upstream.errors import UpstreamError
from gateway.upstream.pool import Pool
from gateway.waiting import WaitingRoom
from scheduler.admission.fair_queue import Waiting, rank
from scheduler.retrying import Failure, RetryBudget, Retrying

log = logging.getLogger(__name__)

STALLED_S = 300.0
"""A stream that says nothing for so long is over."""
RETRY_AFTER_S = 1.0
_SAYS_NOTHING = (Failure.REQUEST, Failure.BUSY)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all requests have in common."""

    pool: Pool
    waiting: WaitingRoom
    figures: RelayFigures
    places: Places
    budget: RetryBudget
    heads: Heads


class Wanted(msgspec.Struct, frozen=True):
    """What is sent, and on what terms. ``headers`` are lines of a head; ``deadline`` is the event loop's time.

    ``strips_usage``: the event with usage was asked for by the gateway, and the client is not to see it.
    ``where`` it may go.
    """

    body: bytes
    headers: bytes
    streams: bool
    strips_usage: bool
    deadline: float
    account: str
    weight: float
    urgency: int
    prompt_tokens: int
    work_s: float
    where: Where


class Tries:
    """``run`` once. While nothing was said to the client a failure may be mended by another try."""

    def __init__(self, shared: Shared, caller: Caller, wanted: Wanted, engines: list[Engine]) -> None:
        self._s = shared
        self._caller = caller
        self._w = wanted
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._tried: set[str] = set()
        self._passing: Passing | None = None
        self._end: End | None = None
        self._heard = 0
        self._stall: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Answer the caller. Raises ApiError where nothing was said to it."""
        retrying = Retrying(self._s.budget, self._began)
        while True:
            use = await self._turn()
            engine = use.engine
            self._tried.add(engine.name)
            self._caller.goes_to(engine.config, self._s.places.local == engine.config.cluster)
            passing = await self._try(use)
            end = self._end = passing.end.result()
            self._s.figures.engine(engine.name).count(end.value)
            if end is End.WHOLE:
                self._caller.finish()
                return
            if end is End.BROKEN:
                log.warning("answer broke off id=%s engine=%s", self._caller.request_id, engine.name)
                self._caller.finish() if passing.told else self._caller.cut()
                return
            now, failure = self._loop.time(), passing.failure
            assert failure is not None
            left = self._w.deadline - now
            pause = retrying.next_s(failure, False, now, left, random.random(), passing.retry_after_s)  # noqa: S311
            log.warning(
                "try failed id=%s engine=%s cause=%s again_in_s=%s",
                self._caller.request_id,
                engine.name,
                passing.status if passing.error is None else passing.error.cause.value,
                pause,
            )
            if pause is None:
                self._give_up(passing)
                return
            self._s.figures.retries += 1
            await asyncio.sleep(pause)

    def spoken(self, prompt_tokens: int) -> tuple[int | None, int, bool]:
        """Tokens of the answer (None where none came) and of the prompt, and whether that was all of it."""
        passing = self._passing
        if passing is None or not passing.begun or passing.status >= 400:
            return None, prompt_tokens, False
        usage = passing.usage()
        self._s.figures.spoke(usage, passing.events)
        if usage is None:
            return passing.events, prompt_tokens, self._end is End.WHOLE
        return usage.completion, usage.prompt, self._end is End.WHOLE

    # ---- its turn

    async def _turn(self) -> Use:
        """The use of an engine, to be ended; where all are busy it waits in the queue. Raises ApiError."""
        waiting, w = self._s.waiting, self._w
        engine = None if waiting.anybody_before(False) else self._pick()
        if engine is not None:
            waiting.passed(w.account, w.work_s, w.weight)
            return engine.begin(self._loop.time())
        self._check_hope()
        found: list[Use] = []

        def start() -> bool:
            self._check_hope()
            engine = self._pick()
            if engine is None:
                return False
            found.append(engine.begin(self._loop.time()))
            return True

        needs = ("relay", self._engines[0].config.model, w.where)
        order = rank(self._began, w.work_s, w.urgency)
        entry = Waiting(w.account, w.work_s, w.prompt_tokens, order, w.weight, needs)
        try:
            await waiting.wait(entry, start, w.deadline - self._loop.time())
        except BaseException:
            for use in found:
                use.end(None, self._loop.time())
            raise
        return found[0]

    def _pick(self) -> Engine | None:
        return pick(self._engines, self._may, self._tried, self._loop.time())

    def _may(self, engine: Engine) -> bool:
        return engine.config.cluster in self._w.where.working

    def _check_hope(self) -> None:
        """Raise ApiError where waiting does not help."""
        now = self._loop.time()
        allowed = [engine for engine in self._engines if self._may(engine)]
        if not self._w.where.permitted:
            text = (
                "this key's prompts may not be where this model's engines are; use a key of another region or cluster"
            )
            raise ApiError(403, text, code="residency")
        if not allowed:
            text = "all clusters whose engines serve this model are drained; resume one with `prfaas clusters resume`"
            raise ApiError(503, text, code="overloaded", retry_after_s=RETRY_AFTER_S)
        well = [engine for engine in allowed if engine.trouble is None and not engine.draining]
        if not well:
            text = "no engine of this model is well; `prfaas status` says what is wrong with each"
            raise ApiError(503, text, code="engine_unwell", retry_after_s=RETRY_AFTER_S)
        wait_s = min(engine.breaker.retry_after_s(now) for engine in well)
        if wait_s > 0:
            text = "the circuit breakers of all engines of this model are open: they failed too often"
            raise ApiError(503, text, code="breaker_open", retry_after_s=wait_s)

    # ---- one try

    async def _try(self, use: Use) -> Passing:
        """Send it there and return when nothing more comes, with ``end`` set. Cancelled, it closes the connection."""
        passing = self._passing = Passing(self._caller, self._loop, self._w.strips_usage)
        engine = use.engine
        connection: Connection | None = None
        well: bool | None = None
        try:
            w, pool = self._w, self._s.pool
            origin, head = self._s.heads.head(engine.config, self._caller.path, w.headers, len(w.body))
            connection = pool.idle(origin)
            if connection is None:
                connection = await pool.acquire(origin, w.deadline)
            self._caller.flows(connection.pause, connection.resume)
            connection.start(head, w.body, passing, w.deadline)
            if w.streams:
                self._watch(passing, connection)
            await passing.end
            connection = None
        except UpstreamError as error:
            passing.on_failure(error)
        finally:
            self._caller.flows(None, None)
            if self._stall is not None:
                self._stall.cancel()
            if connection is not None:
                connection.abandon()
            if passing.end.done():
                failure = passing.failure
                well = failure is None or (None if failure in _SAYS_NOTHING else False)
            use.end(well, self._loop.time())
            self._s.figures.engine(engine.name).pieces += passing.pieces
            if passing.first_at is not None:
                self._s.figures.first(self._caller.route, passing.first_at - self._began)
            self._s.waiting.kick()
        return passing

    def _watch(self, passing: Passing, connection: Connection) -> None:
        """End a stream that stalls; looked at now and then, so that it costs nothing a chunk."""
        self._heard = 0

        def look() -> None:
            if passing.begun and passing.pieces == self._heard and not connection.paused:
                connection.give_up("the stream stalled")
                return
            self._heard = passing.pieces
            self._stall = self._loop.call_later(STALLED_S, look)

        self._stall = self._loop.call_later(STALLED_S, look)

    # ---- no success

    def _give_up(self, passing: Passing) -> None:
        """Raise ApiError, or pass on what the engine said itself where clients can read it."""
        if passing.error is not None:
            raise broke_off(passing.error)
        if passing.status in (401, 403):
            text = "the engine refuses this gateway's own key; set key_file of that engine"
            raise ApiError(502, text, code="engine_refused")
        if is_error_object(passing.held):
            self._caller.respond(passing.status, passing.headers, passing.held)
            return
        text = f"the engine answered {passing.status}, and nothing that explains it"
        if passing.failure is Failure.BUSY:
            raise ApiError(
                passing.status, text, code="engine_busy", retry_after_s=passing.retry_after_s or RETRY_AFTER_S
            )
        raise ApiError(504 if passing.failure is Failure.LATE else 502, text, code="engine_failed")
