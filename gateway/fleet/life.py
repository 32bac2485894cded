"""The life of one request to split engines: decide, ask both, mend what can be mended before the first byte, let go.

What a prefill engine spoils is mended at home, within the budget of all fallbacks; what a decode engine spoils, by
another one. What the request itself is to blame for goes to its client as the engine said it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from secrets import SystemRandom
from typing import Any

from msgspec import structs

from gateway import refusals
from gateway.building import Prompted
from gateway.config import FallbackPolicy
from gateway.dialects.leg import LegFailed
from gateway.dialects.parts import joined
from gateway.dialects.stream_join import StreamJoin
from gateway.errors import ApiError
from gateway.fleet.asked import Asked, EngineRefused, Splits
from gateway.fleet.attempt import Order, SplitAttempt
from gateway.fleet.config import DialectName
from gateway.fleet.facts import gather
from gateway.kv_lookup import Held
from gateway.lateness import late_after_s
from gateway.request_record import Recorded
from gateway.turn import Turn, Way
from kvcache.control import Finished
from scheduler.admission.holding import displaced
from scheduler.decision import Decision, Reason
from scheduler.facts import Facts
from scheduler.predict import compute_s
from scheduler.retrying import Failure, Retrying

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""How long what the prefix index said of a prompt is taken for true while the prompt waits."""
MOST_ROOM = 1 << 62
_CHANCE = SystemRandom()
_NO_WAY = {
    Reason.NO_PREFILL: "no engine of this model that prefills is well; `prfaas status` says what is wrong with them",
    Reason.NO_DECODE_NODE: "no engine of this model that decodes is well; `prfaas status` says what is wrong with them",
    Reason.OVERLOADED: "all engines of this model are full; add engines, or try again later",
}


class SplitLife:
    """Call ``begin``, then ``chunks`` or ``whole``, and in any case ``close``."""

    def __init__(self, splits: Splits, prompted: Prompted, asked: Asked) -> None:
        self._splits = splits
        self._s = splits.services
        self._p = prompted
        self._asked = asked
        self._loop = asyncio.get_running_loop()
        began = self._loop.time()
        self.deadline = began + self._s.config.request_timeout_s
        self.record: Recorded[SplitAttempt] = Recorded(prompted, began)
        self._turn = Turn(self._s.waiting, prompted, began, self.deadline, asked.model)
        self._retrying = Retrying(self._s.retries, began)
        self._without: set[str] = set()
        self._failure: LegFailed | None = None
        self._held: tuple[float, Mapping[str, Held]] = (float("-inf"), {})
        self._at_home = False
        self._closed = False

    async def begin(self) -> None:
        """Return when the answer has begun. Raises ApiError and EngineRefused."""
        while True:
            await self._turn.go(Way(self._choose, self._start, self._refused, self._at_home))
            attempt, decision = self.record.attempts[-1], self.record.decisions[-1]
            try:
                await attempt.begin()
            except LegFailed as failure:
                attempt.close("failed", failure)
                await self._mend(attempt, failure)
            else:
                self._begun(attempt, decision)
                return

    async def chunks(self) -> AsyncIterator[bytes]:
        """A stream's events. Raises ApiError where it breaks off."""
        attempt = self.record.attempts[-1]
        join = StreamJoin(self._asked.body, attempt.legs, self._asked.parts, attempt.dialect)
        try:
            async for chunk in join.chunks():
                self.record.spoken = join.events
                yield chunk
        except LegFailed as failure:
            attempt.close("failed", failure)
            self._note(failure)
            raise _failed("the answer broke off", failure) from failure
        self._ended(join.usage, join.finish, join.events)

    async def whole(self) -> dict[str, Any]:
        """An answer that is no stream."""
        attempt = self.record.attempts[-1]
        answers = []
        for legs in attempt.legs:
            answer = await legs.whole()
            if attempt.dialect is not None:
                attempt.dialect.join(self._asked.body, answer, await legs.handed_off(), True)
            answers.append(answer)
        found = joined(answers, self._asked.parts)
        found.pop("kv_transfer_params", None)  # where engines find each other's KV is not for clients
        choices = found.get("choices") or [{}]
        usage = found.get("usage")
        self._ended(usage if isinstance(usage, dict) else None, choices[-1].get("finish_reason"), len(choices))
        return found

    def close(self, outcome: str) -> None:
        """Let go of everything and keep the record. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.record.finished is not None:
            outcome = "finished"
        if self.record.attempts:
            self.record.attempts[-1].close(outcome)
        self._turn.end(self.record.finished)
        values, now = self._s.policy.values, self._loop.time()
        self._s.decisions.add(self.record.kept(outcome, values, self._turn.waited_s, now))

    # ---- ways

    def _choose(self) -> Decision:
        facts = self._facts()
        return self._s.policy.fall_back(facts) if self._at_home else self._s.policy.decide(facts)

    def _start(self, decision: Decision) -> None:
        self.record.decided(decision, self._at_home)
        chosen = decision.chosen
        kind = "none" if chosen is None else "remote" if decision.remote else "local"
        self._s.metrics.decisions.labels(kind, decision.reason.value).inc()
        if chosen is None:
            raise self._no_way(decision)
        if self._at_home:
            self._spend(decision)
        elif not self.record.attempts:
            self._turn.check_slo(chosen.predicted_ttft_s)
        self._turn.rank(self._at_home)
        now, number = self._loop.time(), len(self.record.attempts) + 1
        late_after = late_after_s(decision)
        order = Order(
            self._p.facts.request_id,
            self._p.endpoint,
            self._asked.parts,
            chosen,
            tuple(_CHANCE.randrange(MOST_ROOM) for _ in self._asked.parts),
            self.deadline if late_after is None else min(self.deadline, now + late_after),
            self.deadline,
        )
        self.record.attempts.append(SplitAttempt(number, order, self._splits.calls, self._asked.dialect))
        log.info(
            "dispatch id=%s attempt=%d cluster=%s prefill=%s decode=%s reason=%s",
            self._p.facts.request_id,
            number,
            chosen.cluster,
            chosen.prefill_node,
            chosen.decode_node,
            decision.reason.value,
        )

    def _refused(self, decision: Decision) -> None:
        self.record.decided(decision, self._at_home)
        self._s.metrics.decisions.labels("none", decision.reason.value).inc()

    def _spend(self, decision: Decision) -> None:
        """Take a fallback from the budget of all. Raises ApiError 503 where it is spent."""
        assert decision.chosen is not None
        assert self._failure is not None
        if not self._failure.faulty:
            return
        option, now = decision.chosen, self._loop.time()
        by = [node for node in decision.facts.decode_nodes if node.node_id == option.decode_node]
        stop = option.cached_tokens + option.compute_increment
        cost = compute_s(option.cached_tokens, stop, by[0].prefill if by else None)
        if self._s.budget.admit(now, cost, len(decision.facts.decode_nodes)):
            self._s.metrics.fallbacks.labels("local").inc()
            return
        self._s.metrics.fallbacks.labels("over_budget").inc()
        raise ApiError(
            503,
            f"the {self.record.route.route} way failed ({self._failure}) "
            "and the budget for prefilling at home is spent",
            code="fallback_budget_exhausted",
            retry_after_s=self._s.budget.retry_after_s(now),
        )

    async def _mend(self, attempt: SplitAttempt, failure: LegFailed) -> None:
        """Get ready for another way. Raises what the client is told where there is none."""
        self._note(failure)
        if failure.kind is Failure.REQUEST:
            raise EngineRefused(failure.status, failure.body) from failure
        now = self._loop.time()
        if now >= self.deadline:
            raise refusals.too_late(self._s.config.request_timeout_s) from failure
        if self._s.config.fallback is FallbackPolicy.FAIL and attempt.split and failure.faulty:
            self._s.metrics.fallbacks.labels("forbidden").inc()
            raise _failed(f"the {self.record.route.route} way failed", failure) from failure
        self._failure = failure
        blamed = attempt.blamed(failure)
        if failure.faulty:
            self._without.add(blamed)
        home = attempt.split and (blamed == attempt.option.prefill_node or not failure.faulty)
        if home and self._asked.name is not DialectName.SGLANG:
            self._at_home = True
            return
        pause = self._retrying.next_s(failure.kind, False, now, self.deadline - now, _CHANCE.random())
        if pause is None:
            raise _failed("the engines failed", failure) from failure
        self._s.metrics.retries.labels("local" if self._at_home else "remote").inc()
        await asyncio.sleep(pause)

    def _no_way(self, decision: Decision) -> ApiError:
        if self._failure is not None and decision.reason is not Reason.RESIDENCY:
            return _failed("no other engine is left after the first failed", self._failure)
        if decision.reason in _NO_WAY:
            text, code = _NO_WAY[decision.reason], decision.reason.value
            return ApiError(503, text, code=code, retry_after_s=refusals.RETRY_AFTER_S)
        return refusals.no_way(decision)

    def _facts(self) -> Facts:
        now = self._loop.time()
        looked_at, held = self._held
        if now >= looked_at + LOOK_AGAIN_S:
            held = self._s.prefixes.matches(self._p.names, now)
            self._held = now, held
        request, waited = self._p.facts, self._turn.waited_s
        if waited:
            request = structs.replace(request, waited_s=waited)
        return gather(
            self._splits.calls.fleet,
            self._asked.model,
            request,
            self._s.threshold.tokens,
            now,
            self._without,
            held,
            self._splits.terms,
        )

    # ---- accounting

    def _begun(self, attempt: SplitAttempt, decision: Decision) -> None:
        option, now = attempt.option, self._loop.time()
        if self._asked.streams:
            self.record.first_at = now
            self._s.metrics.ttft.labels(self.record.route.route).observe(now - self.record.began)
            predicted = option.predicted_ttft_s
            last = decision.reason is Reason.FALLBACK or displaced(decision)
            if option.cluster is not None and predicted is not None and not last:
                fleet = self._splits.calls.fleet
                applied = next(one.ttft_ratio for one in decision.facts.clusters if one.name == option.cluster)
                fleet.accuracy(option.cluster).observe(predicted / applied, now - attempt.began, now)
        if not attempt.split and self._p.facts.prompt_tokens > 1:
            self._s.metrics.in_place.inc()
        names = [name for name in (option.prefill_node, option.decode_node) if name is not None]
        for name in names:
            self._s.prefixes.sent(name, self._p.names, now)
        self._s.affinity.served(self._p.facts.tenant, self._p.session, names, now)
        self._s.waiting.kick()

    def _ended(self, usage: Mapping[str, Any] | None, finish: Any, pieces: int) -> None:
        told = usage or {}
        details = told.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt, spoken = told.get("prompt_tokens"), told.get("completion_tokens")
        done = Finished(
            self._p.facts.request_id,
            finish if isinstance(finish, str) else "stop",
            prompt if type(prompt) is int else self._p.facts.prompt_tokens,
            spoken if type(spoken) is int else pieces,
            cached if type(cached) is int else 0,
        )
        self.record.saw(done)
        self.record.attempts[-1].told_cached(cached if type(cached) is int else None)
        if self._p.names and done.prompt_tokens != self._p.facts.prompt_tokens:
            log.warning("usage differs id=%s engine_says=%d", self._p.facts.request_id, done.prompt_tokens)
            self._s.metrics.usage_differs.inc()
            self._s.prefixes.distrust()

    def _note(self, failure: LegFailed) -> None:
        self._s.metrics.failed(failure.leg, failure.cause)
        if failure.faulty:
            self._splits.health.look_now()
        log.warning("attempt failed id=%s %s", self._p.facts.request_id, failure)


def _failed(what: str, failure: LegFailed) -> ApiError:
    return ApiError(503, f"{what}: {failure}", code=failure.cause, retry_after_s=refusals.RETRY_AFTER_S)
