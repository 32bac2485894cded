"""The life of one request: decide, sign, dispatch, wait, fall back, speak, and always let go.

Until the first token a failure may be mended: by another remote way where there is one, else by a fallback at home;
if that fails for what another node may do better, by one more of its kind. All of it has budgets. After the first token
there is no retry: the answer ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from secrets import SystemRandom

from msgspec import structs

from gateway import refusals
from gateway.attempts import Attempt
from gateway.breakers import Trial
from gateway.building import Prompted
from gateway.config import FallbackPolicy
from gateway.ending import READ_GRACE_S
from gateway.errors import ApiError
from gateway.failures import AttemptFailed, kind_of
from gateway.falling_back import Fallback
from gateway.gather import gather
from gateway.kv_audits import Served
from gateway.kv_lookup import Held
from gateway.lateness import late_after_s
from gateway.moving import MOVED
from gateway.request_record import RequestRecord
from gateway.services import Services
from gateway.turn import Turn, Way
from gateway.uncached import uncached_at_home
from kvcache.control import AnswerEnded, AnswerPart, Delta, Finished
from kvcache.quality import Quality
from kvcache.tracing import part
from scheduler.admission.holding import displaced
from scheduler.decision import Decision
from scheduler.facts import Facts
from scheduler.retrying import Failure, Retrying

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""How long what the prefix index said of a prompt is taken for true while the prompt waits."""
_CHANCE = SystemRandom()
ANOTHER_NODE = (Failure.NOT_SENT, Failure.LOST, Failure.BUSY)
"""What says nothing of the request itself, so that another node may well do better."""
METERED_EVERY_S = 1.0
"""How often the meter hears of an answer's tokens while it goes on."""
PREFIX_GONE = "prefix_gone"
"""A decode node's word that it no longer holds what a transfer left out."""


class RequestLife:
    """Call ``first``, then ``rest``, and in any case ``close``."""

    def __init__(self, services: Services, prompted: Prompted) -> None:
        self._s = services
        self._p = prompted
        self._loop = asyncio.get_running_loop()
        began = self._loop.time()
        self.deadline = began + services.config.request_timeout_s
        self.record = RequestRecord(prompted, began)
        self._turn = Turn(services.waiting, prompted, began, self.deadline)
        self._policy = services.policy
        self._retrying = Retrying(services.retries, began)
        self._trial: Trial | None = None
        self._holds_nothing: set[str] = set()
        self._without: set[str] = set()
        self._dispatched_at = began
        self._comes_last = False
        self._held: tuple[float, Mapping[str, Held]] = (float("-inf"), {})
        self._hear: Callable[[AnswerPart], None] | None = None
        self._heard_at = began
        self._held_back = False
        self._unmetered = 0
        self._metered_at = float("-inf")
        """What is spoken first begins the answer for the meter, too, so it is told at once."""
        self._counted = False
        self._closed = False

    async def first(self) -> AnswerPart:
        """The first piece of the answer, by the first way or the fallback. Raises ApiError."""
        try:
            return await self._first_way()
        except AttemptFailed as failure:
            if self._s.config.fallback is FallbackPolicy.FAIL:
                self._s.metrics.fallbacks.labels("forbidden").inc()
                raise refusals.failed(f"the {self.record.route.route} way failed", failure) from failure
            return await self._at_home(failure)

    async def rest(self, first: AnswerPart, hear: Callable[[Delta | AnswerEnded], None]) -> Finished:
        """``hear`` each piece as it comes, and return how the answer ended.

        Raises ApiError where it breaks off, and TimeoutError where what came is not heard for too long: see ``hold``.
        """
        if isinstance(first, Finished):
            return first
        hear(first)
        attempt = self.record.attempts[-1]
        self._heard_at = self._loop.time()
        self._hear = self._hearing(hear)
        if not self._held_back:
            attempt.tell(self._hear)
        try:
            await self._over(attempt)
        except AttemptFailed as failure:
            self._note(attempt, failure)
            raise refusals.failed("the answer broke off", failure) from failure
        finally:
            attempt.tell(None)
        done = self.record.finished
        assert done is not None
        return done

    def hold(self) -> None:
        """Until ``go_on`` nobody hears what comes: it waits, within bounds."""
        self._held_back = True
        if self._hear is not None:
            self.record.attempts[-1].tell(None)

    def go_on(self) -> None:
        """What waits is heard, and what follows."""
        self._held_back = False
        self._heard_at = self._loop.time()
        if self._hear is not None:
            self.record.attempts[-1].tell(self._hear)

    async def _over(self, attempt: Attempt) -> None:
        """Raises AttemptFailed, ApiError at the deadline, and TimeoutError where a client has not read all by then."""
        for due in (self.deadline, self.deadline + READ_GRACE_S):
            try:
                await attempt.over(due)
                return
            except TimeoutError:
                if not attempt.unheard:
                    self._blame(AttemptFailed("decode", "deadline", node_id=attempt.option.decode_node))
                    raise self._too_late() from None
        raise TimeoutError

    def _hearing(self, hear: Callable[[Delta | AnswerEnded], None]) -> Callable[[AnswerPart], None]:
        """What is done for each piece of an answer, once for every token that is spoken."""
        time_now, gap = self._loop.time, self._s.metrics.gap.only

        def heard(item: AnswerPart) -> None:
            now = time_now()
            gap.observe(now - self._heard_at)
            self._heard_at = now
            self._saw(item, now)
            if not isinstance(item, Finished):
                hear(item)

        return heard

    def close(self, outcome: str) -> None:
        """Let go of everything and keep the record. Idempotent."""
        if self._closed:
            return
        self._closed = True
        now = self._loop.time()
        self._metered(now)
        if not self._p.measures:
            self._s.meter.ended(self, self.record.finished is not None)
        if self.record.finished is not None:
            outcome = "finished"
        if self.record.attempts:
            self.record.attempts[-1].close(outcome)
            if self.record.finished is not None:
                self._perhaps_audited(self.record.attempts[-1])
        self._count_moves()
        self._turn.end(self.record.finished)
        if self._trial is not None:
            self._trial.end(self.record.finished is not None, now)
        self._s.decisions.add(self.record.kept(outcome, self._policy.values, self._turn.waited_s, now))

    def _perhaps_audited(self, attempt: Attempt) -> None:
        """KV that a remote cluster computed may have to stand a comparison."""
        leg, facts = attempt.leg, self._p.facts
        if leg is None or leg.node.join.cluster == self._s.registry.local_cluster:
            return
        exact, ids = attempt.exactness is Quality.EXACT, self._p.token_ids
        place = (leg.node.join.cluster, leg.node.node_id, attempt.decode)
        self._s.audits.served(Served(*place, ids, facts.tenant, facts.lora, exact))

    # ---- ways

    async def _first_way(self) -> AnswerPart:
        """The way that policy chooses; again where a node held less than was thought, or another remote way is left."""
        await self._go(Way(self._decide, self._start_first, self._refused))
        while True:
            attempt = self.record.attempts[-1]
            try:
                return await self._first_of(attempt, late_after_s(self.record.decisions[-1]))
            except AttemptFailed as failure:
                self._note(attempt, failure)
                node = attempt.option.decode_node
                if failure.cause == PREFIX_GONE and node not in self._holds_nothing:
                    self._holds_nothing.add(node)
                    start = self._start_first
                elif self._elsewhere(attempt, failure):
                    await self._pause(failure, "remote")
                    start = partial(self._start_remote, failure)
                else:
                    raise
            await self._go(Way(self._decide, start, self._refused))

    def _elsewhere(self, attempt: Attempt, failure: AttemptFailed) -> bool:
        """Whether a remote way that failed leaves another one. Home is for the fallback, whose budget protects it."""
        if self._s.config.fallback is FallbackPolicy.FAIL or not self.record.decisions[-1].remote:
            return False
        assert self._trial is not None
        if kind_of(failure) not in ANOTHER_NODE and self._trial.blamed(failure) != attempt.option.prefill_node:
            return False
        self._without |= Fallback(self._s, attempt, failure, self.record.route.route).without
        return self._decide().remote

    def _start_remote(self, failure: AttemptFailed, decision: Decision) -> None:
        if not decision.remote:
            raise failure
        self._start(decision, last=False)

    async def _pause(self, failure: AttemptFailed, way: str) -> None:
        """Wait before another try of that kind. Raises ``failure`` where there must be none."""
        now = self._loop.time()
        pause = self._retrying.next_s(kind_of(failure), False, now, self.deadline - now, _CHANCE.random())
        if pause is None:
            raise failure
        self._s.metrics.retries.labels(way).inc()
        await asyncio.sleep(pause)

    async def _at_home(self, failure: AttemptFailed) -> AnswerPart:
        """The fallback, and others for it where it fails. Raises ApiError."""
        while True:
            fallback = Fallback(self._s, self.record.attempts[-1], failure, self.record.route.route)
            self._without |= fallback.without
            attempt = await self._fall_back(fallback)
            try:
                return await self._first_of(attempt, None)
            except AttemptFailed as another:
                failure = another
                self._note(attempt, failure)
            try:
                if kind_of(failure) not in ANOTHER_NODE:
                    raise failure
                await self._pause(failure, "local")
            except AttemptFailed:
                raise refusals.failed("the fallback failed too", failure) from failure

    def _decide(self) -> Decision:
        decision = self._policy.decide(self._facts())
        if not self._counted and not self._p.measures:
            self._s.meter.arrived(uncached_at_home(decision.facts))
        self._counted = True
        return decision

    def _start_first(self, decision: Decision) -> None:
        self._check_time(decision)
        if not self.record.attempts and decision.chosen is not None:
            try:
                self._turn.check_slo(decision.chosen.predicted_ttft_s)
            except ApiError:
                self._refused(decision)
                raise
        self._start(decision, last=False)

    async def _fall_back(self, fallback: Fallback) -> Attempt:
        """The attempt at home, once there is room for it and while the budget has some. Raises ApiError 503."""

        def choose() -> Decision:
            return self._policy.fall_back(self._facts())

        def start(decision: Decision) -> None:
            try:
                self._check_time(decision, last=True)
            except ApiError:
                fallback.refused()
                raise
            try:
                fallback.spend(decision, self._loop.time())
            except ApiError:
                self.record.decided(decision, last=True)
                raise
            self._start(decision, last=True)

        def refused(decision: Decision) -> None:
            self._refused(decision, last=True)
            fallback.refused()

        await self._go(Way(choose, start, refused, last=True))
        return self.record.attempts[-1]

    async def _go(self, way: Way) -> None:
        """Wait for a turn, decide, send."""
        with part(self._p.span, "route"):
            await self._turn.go(way)

    def _check_time(self, decision: Decision, last: bool = False) -> None:
        """Raise ApiError for what comes last and would come too late: it would be computed in vain."""
        chosen, now = decision.chosen, self._loop.time()
        if chosen is None or chosen.predicted_ttft_s is None or not (last or displaced(decision)):
            return
        if now + chosen.predicted_ttft_s * max(1.0, self._s.registry.last_accuracy.value(now)) > self.deadline:
            self._refused(decision, last)
            raise refusals.no_time(self._s.config.request_timeout_s)

    def _refused(self, decision: Decision, last: bool = False) -> None:
        self.record.decided(decision, last)
        self._s.metrics.decisions.labels("none", decision.reason.value).inc()

    # ---- one attempt

    def _start(self, decision: Decision, last: bool) -> None:
        """Send it by the way chosen. Raises ApiError where there is none."""
        self.record.decided(decision, last)
        kind = "none" if decision.chosen is None else "remote" if decision.remote else "local"
        self._s.metrics.decisions.labels(kind, decision.reason.value).inc()
        if decision.chosen is None:
            raise refusals.no_way(decision)
        self._comes_last = last or displaced(decision)
        number, priority = len(self.record.attempts) + 1, self._turn.rank(self._comes_last)
        attempt = self._s.builder.build(self._p, decision.chosen, number, priority, self.deadline - self._loop.time())
        self.record.attempts.append(attempt)
        log.info(
            "dispatch request=%s client_id=%s attempt=%d cluster=%s prefill=%s decode=%s reason=%s",
            self._p.facts.request_id,
            self._p.request_id,
            attempt.number,
            attempt.option.cluster,
            attempt.option.prefill_node,
            attempt.option.decode_node,
            decision.reason.value,
        )
        self._dispatched_at = self._loop.time()
        registry = self._s.registry
        self._trial = Trial(registry.breakers, attempt, registry.local_cluster, self._dispatched_at)
        attempt.dispatch()

    async def _first_of(self, attempt: Attempt, late_after: float | None) -> AnswerPart:
        """Wait for the first piece. Raises AttemptFailed, also for a late attempt, and ApiError at the deadline."""
        left = self.deadline - self._loop.time()
        patience = left if late_after is None else min(left, late_after)
        try:
            item = await attempt.next(max(0.0, patience))
        except TimeoutError:
            if patience < left:
                self._learn(attempt, self._loop.time())
                late = AttemptFailed("wait", "late", f"no token after {patience:.1f} s")
                attempt.close("late", late)
                raise late from None
            if self._comes_last:  # its nodes may be well, and have other things to do
                self._learn(attempt, self._loop.time())
            else:
                self._blame(AttemptFailed("wait", "deadline"))
            raise self._too_late() from None
        now = self.record.first_at = self._loop.time()
        assert self._trial is not None
        self._trial.prefilled(now)
        self._s.metrics.ttft.labels(self.record.route.route).observe(now - self.record.began)
        self._p.span.happened("first_token")
        self._saw(item, now)
        self._count_transfer(attempt)
        self._learn(attempt, now)
        nodes = [node for node in (attempt.option.prefill_node, attempt.option.decode_node) if node is not None]
        for node in nodes:
            self._s.prefixes.sent(node, self._p.names, now)
        self._s.affinity.served(self._p.facts.tenant, self._p.session, nodes, now)
        self._s.waiting.kick()  # its prefill node has a slot again
        return item

    def _learn(self, attempt: Attempt, now: float) -> None:
        """How far the prediction was off; that of what comes last at home is so for reasons of its own."""
        decision, option = self.record.decisions[-1], attempt.option
        if option.cluster is None or option.predicted_ttft_s is None:
            return
        if attempt.before is not None and attempt.before.outcome != MOVED:
            return
        took = now - self._dispatched_at
        if self._comes_last:
            self._s.registry.last_accuracy.observe(option.predicted_ttft_s, took, now)
            return
        applied = next(cluster.ttft_ratio for cluster in decision.facts.clusters if cluster.name == option.cluster)
        self._s.registry.accuracy(option.cluster).observe(option.predicted_ttft_s / applied, took, now)

    def _facts(self) -> Facts:
        now = self._loop.time()
        looked_at, held = self._held
        if now >= looked_at + LOOK_AGAIN_S:
            held = self._s.prefixes.matches(self._p.names, now)
            self._held = now, held
        if self._holds_nothing:
            held = {node: kept for node, kept in held.items() if node not in self._holds_nothing}
        request, waited = self._p.facts, self._turn.waited_s
        if waited:
            request = structs.replace(request, waited_s=waited)
        return gather(self._s.registry, request, self._s.threshold.tokens, now, self._without, held)

    # ---- accounting

    def _saw(self, item: AnswerPart, now: float) -> None:
        self.record.saw(item)
        if isinstance(item, Delta):
            self._unmetered += len(item.token_ids)
            if now >= self._metered_at + METERED_EVERY_S:
                self._metered(now)
        elif isinstance(item, Finished) and item.prompt_tokens != len(self._p.token_ids):
            log.warning("usage differs request=%s node_says=%d", self._p.facts.request_id, item.prompt_tokens)
            self._s.metrics.usage_differs.inc()
            self._s.prefixes.distrust()

    def _metered(self, now: float) -> None:
        """Tell of what was spoken since this was last told."""
        if self._unmetered and not self._p.measures:
            self._s.meter.spoke(self, self._unmetered, now)
        self._unmetered, self._metered_at = 0, now

    def _blame(self, failure: AttemptFailed) -> None:
        if self._trial is not None:
            self._trial.failed(failure, self._loop.time())

    def _note(self, attempt: Attempt, failure: AttemptFailed) -> None:
        attempt.close("failed", failure)
        self._blame(failure)
        self._s.metrics.failed(failure.stage, failure.cause)
        log.warning("attempt failed request=%s attempt=%d %s", self._p.facts.request_id, attempt.number, failure)

    def _count_moves(self) -> None:
        for attempt in self.record.attempts:
            if attempt.before is not None:
                self._s.metrics.moves.labels(attempt.before.outcome).inc()
                self._s.metrics.moved_bytes.inc(attempt.before.wire_bytes)

    def _count_transfer(self, attempt: Attempt) -> None:
        figures = attempt.record()
        if attempt.leg is None:
            if len(self._p.token_ids) > 1:
                self._s.metrics.in_place.inc()
            return
        cluster = attempt.leg.node.join.cluster
        self._s.metrics.kv_bytes.labels(cluster, "raw").inc(figures["raw_bytes"])
        self._s.metrics.kv_bytes.labels(cluster, "wire").inc(figures["wire_bytes"])
        self._s.metrics.kv_seconds.labels(cluster).observe(figures["transfer_s"])
        self._s.metrics.kv_exposed.labels(cluster).observe(figures["exposed_s"])

    def _too_late(self) -> ApiError:
        return refusals.too_late(self._s.config.request_timeout_s)
