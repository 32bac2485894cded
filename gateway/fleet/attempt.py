"""One try at a request on external engines: all its parts on one pair of them, or on one alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.dialects.errands import Errands
from gateway.dialects.leg import LegFailed
from gateway.dialects.legs import Legs, Whole
from gateway.dialects.operation import TwoLegs, Until
from gateway.dialects.parts import Part
from gateway.dialects.protocol import Ask, Dialect, Handoff, Pair, Side
from gateway.fleet.config import EngineRole
from gateway.fleet.engine import Engine, Use
from gateway.fleet.fleet import Fleet
from gateway.lateness import beyond_s
from gateway.upstream.pool import Pool
from kvcache.quality import Quality
from scheduler.decision import Option


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls to engines go through."""

    fleet: Fleet
    pool: Pool
    errands: Errands


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done: ``parts`` of one request at ``path``, under ``request_id``, by the way ``option``.

    ``rooms`` are random numbers, one a part. Times are the event loop's; ``late_at`` is when a stream must have begun.
    """

    request_id: str
    path: str
    parts: tuple[Part, ...]
    option: Option
    rooms: tuple[int, ...]
    late_at: float
    deadline: float


class SplitAttempt:
    """Call ``begin``, and ``close`` in any case. Each part is a request of its own to its engines."""

    def __init__(self, number: int, order: Order, calls: Calls, dialect: Dialect) -> None:
        self.number = number
        self.option = order.option
        self.legs: list[Legs] = []
        self.split = order.option.prefill_node is not None
        self.dialect = dialect if self.split else None
        self._order = order
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()
        self._first_at: float | None = None
        self._decode = _engine(calls.fleet, order.option.decode_node)
        self._prefill = None if order.option.prefill_node is None else _engine(calls.fleet, order.option.prefill_node)
        self._uses: list[tuple[Use | None, Use]] = []
        self._outcome: tuple[str, LegFailed | None] = ("running", None)
        self._closed = False
        self._figures: dict[str, Any] = {}
        busy = self._prefill  # what it has not computed yet counts as if it were given from now on
        self._given_before = 0 if busy is None else busy.given_tokens - busy.prefilling_tokens
        self._link = None if self._prefill is None else calls.fleet.link(self._prefill.config.cluster)
        tokens = max(1, order.option.compute_increment)
        for at, part in enumerate(order.parts):
            self._add(at, part, dialect, tokens if at == 0 else 0)
        if self._link is not None:
            self._link.started(order.option.transfer_bytes)

    @property
    def leg(self) -> Engine | None:
        """Where it is prefilled apart from decode."""
        return self._prefill

    @property
    def codec(self) -> str | None:
        """What the KV came by: as it is."""
        return "raw" if self.split else None

    async def begin(self) -> None:
        """Return when all parts have begun. Raises LegFailed, and has then let go of everything."""
        tasks = [asyncio.create_task(legs.begin()) for legs in self.legs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._first_at = self._loop.time()
        self._came()

    def close(self, outcome: str, failure: LegFailed | None = None) -> None:
        """Let go of everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._outcome = outcome, failure
        for legs in self.legs:
            legs.close()
        if self._link is not None:
            self._link.ended(self.option.transfer_bytes)
        now = self._loop.time()
        for (prefill, decode), legs in zip(self._uses, self.legs, strict=True):
            if prefill is not None:
                prefill.end(self._well("prefill", failure, legs.prefilled_at is not None), now)
            decode.end(self._well("decode", failure, outcome == "finished"), now)

    def blamed(self, failure: LegFailed) -> str:
        """The engine that failed."""
        if failure.leg == "prefill" and self._prefill is not None:
            return self._prefill.name
        return self._decode.name

    def record(self) -> dict[str, Any]:
        """This attempt as a decision record keeps it."""
        outcome, failure = self._outcome
        option = self.option
        entry: dict[str, Any] = {
            "attempt": self.number,
            "transfer": None,
            "cluster": option.cluster,
            "prefill_node": option.prefill_node,
            "decode_node": option.decode_node,
            "dialect": self._decode.config.dialect.value,
            "parts": len(self.legs),
            "codec": self.codec,
            "exactness": Quality.EXACT.value if self.split else None,
            "quality": Quality.EXACT.value,
            "outcome": outcome,
            "cause": None if failure is None else failure.cause,
            "stage": None if failure is None else failure.leg,
            "detail": None,
        }
        return entry | self._figures

    def _well(self, leg: str, failure: LegFailed | None, ended_well: bool) -> bool | None:
        if failure is not None and failure.leg == leg:
            return False if failure.faulty else None
        return True if ended_well else None

    def _add(self, at: int, part: Part, dialect: Dialect, tokens: int) -> None:
        order, option, now = self._order, self.option, self._loop.time()
        name = f"{order.request_id}.{self.number}" + (f".{at}" if len(order.parts) > 1 else "")
        decode = self._decode.begin(now, 0 if self.split else tokens, option.decode_rank)
        prefill = None if self._prefill is None else self._prefill.begin(now, tokens, option.prefill_rank)
        self._uses.append((prefill, decode))
        here = Side(self._decode.config, decode.rank)
        pool = self._calls.pool
        if prefill is None:
            ask = Ask(order.path, dict(part.body), _rank_headers(decode))
            self.legs.append(Whole(pool, here, ask, name, order.deadline))
            return
        engine = prefill.engine
        there = Side(engine.config, prefill.rank, engine.engine_ids.get(prefill.rank or 0, ""))
        pair = Pair(name, order.path, part.body, there, here, order.rooms[at])
        until = Until(partial(self._late_at, engine), order.deadline)
        heard = partial(self._prefilled, prefill)
        self.legs.append(TwoLegs(pool, self._calls.errands, dialect, pair, until, heard, self._stand_in()))

    def _late_at(self, engine: Engine) -> float:
        """Engines compute several prompts at once: one that was given more since may take the longer for this one."""
        curve = engine.speed.curve
        if curve is None or self._order.late_at >= self._order.deadline:
            return self._order.late_at
        work_s = curve.seconds(0, engine.given_tokens - self._given_before)
        return max(self._order.late_at, self.began + beyond_s(work_s))

    def _stand_in(self) -> Side | None:
        """Another decode engine that is well."""
        now, mine = self._loop.time(), self._decode
        for engine in self._calls.fleet.of(mine.config.model):
            if engine is not mine and engine.config.role is not EngineRole.PREFILL and engine.accepting(now):
                return Side(engine.config, 0 if engine.config.ranks > 1 else None)
        return None

    def told_cached(self, tokens: int | None) -> None:
        """So many tokens of the prompt had not to be computed; None where the engine does not say."""
        if not self.split:
            stop = self.option.cached_tokens + self.option.compute_increment
            self._uses[0][1].learn(min(self.option.cached_tokens if tokens is None else tokens, stop), stop)

    def _prefilled(self, use: Use, handoff: Handoff) -> None:
        """A prefill engine has answered."""
        seconds, told = self._loop.time() - self.began, handoff.cached_tokens
        stop = self.option.cached_tokens + self.option.compute_increment
        use.computed(seconds)
        use.learn(min(self.option.cached_tokens if told is None else told, stop), stop)
        self._figures.setdefault("prefill_s", seconds)

    def _came(self) -> None:
        """All parts have begun. What a stream's beginning tells of the way that its KV came."""
        assert self._first_at is not None
        legs, (prefill, decode) = self.legs[0], self._uses[0]
        streams = bool(self._order.parts[0].body.get("stream"))
        if prefill is None:
            if streams:
                decode.computed(self._first_at - self.began)
            return
        nbytes = self.option.transfer_bytes
        self._figures |= {"raw_bytes": nbytes, "wire_bytes": nbytes}
        if streams and legs.prefilled_at is not None and self._link is not None:
            tail = max(0.0, self._first_at - legs.prefilled_at)
            self._figures |= {"transfer_s": tail, "exposed_s": tail}
            self._link.observe(nbytes, tail, tail, self._first_at)


def _rank_headers(use: Use) -> tuple[tuple[bytes, bytes], ...]:
    return () if use.rank is None else ((b"x-data-parallel-rank", str(use.rank).encode()),)


def _engine(fleet: Fleet, name: str) -> Engine:
    found = fleet.engine(name)
    assert found is not None, "a decision names engines that its facts held, and no await lies between"
    return found
