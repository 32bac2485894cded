"""The life of one request: decide, sign, dispatch, wait, fall back, speak, and always let go.

Until the first token a failure may be mended by one fallback at home. After it there is no retry: the answer ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from gateway import refusals
from gateway.attempts import Attempt
from gateway.building import Prompted
from gateway.config import FallbackPolicy
from gateway.errors import ApiError
from gateway.failures import AttemptFailed
from gateway.falling_back import Fallback
from gateway.gather import gather
from gateway.kv_lookup import Held
from gateway.lateness import late_after_s
from gateway.moving import MOVED
from gateway.request_record import RequestRecord, Route
from gateway.services import Services
from gateway.traffic import uncached_at_home
from gateway.turn import Turn, Way
from kvcache.control import AnswerPart, Delta, Finished
from scheduler.decision import Decision, Reason
from scheduler.facts import Facts

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""How long what the prefix index said of a prompt is taken for true while the prompt waits."""
PREFIX_GONE = "prefix_gone"
"""A decode node's word that it no longer holds what a transfer left out."""


class RequestLife:
    """Call ``first``, then ``following`` until Finished, and in any case ``close``."""

    def __init__(self, services: Services, prompted: Prompted) -> None:
        self._s = services
        self._p = prompted
        self._loop = asyncio.get_running_loop()
        began = self._loop.time()
        self.deadline = began + services.config.request_timeout_s
        self._record = RequestRecord(prompted, began)
        self._turn = Turn(services.waiting, prompted, began, self.deadline)
        self._holds_nothing: set[str] = set()
        self._dispatched_at = began
        self._held: tuple[float, Mapping[str, Held]] = (float("-inf"), {})
        self._counted = False
        self._closed = False

    @property
    def route(self) -> Route:
        """The way that the last attempt took."""
        return self._record.route

    @property
    def finished(self) -> Finished | None:
        """How the answer ended, once it ended well."""
        return self._record.finished

    @property
    def spoken(self) -> int | None:
        """Tokens of the answer that came so far; None before the first."""
        return self._record.spoken

    async def first(self) -> AnswerPart:
        """The first piece of the answer, by the first way or the fallback. Raises ApiError."""
        try:
            return await self._first_way()
        except AttemptFailed as failure:
            attempt = self._record.attempts[-1]
            if self._s.config.fallback is FallbackPolicy.FAIL:
                self._s.metrics.fallbacks.labels("forbidden").inc()
                raise refusals.failed(f"the {self.route.route} way failed", failure) from failure
            attempt = await self._fall_back(Fallback(self._s, attempt, failure, self.route.route))
        try:
            return await self._first_of(attempt, None)
        except AttemptFailed as failure:
            self._note(attempt, failure)
            raise refusals.failed("the fallback failed too", failure) from failure

    async def following(self) -> AnswerPart:
        """The next piece after the first, up to Finished. Raises ApiError when the answer breaks off."""
        attempt = self._record.attempts[-1]
        before = self._loop.time()
        try:
            item = await attempt.next(max(0.0, self.deadline - before))
        except TimeoutError:
            raise self._too_late() from None
        except AttemptFailed as failure:
            self._note(attempt, failure)
            raise refusals.failed("the answer broke off", failure) from failure
        self._s.metrics.gap.observe(self._loop.time() - before)
        self._saw(item)
        return item

    def close(self, outcome: str) -> None:
        """Let go of everything and keep the record. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._p.measures:
            self._s.meter.ended(self, self.finished is not None)
        if self.finished is not None:
            outcome = "finished"
        if self._record.attempts:
            self._record.attempts[-1].close(outcome)
        self._count_moves()
        self._turn.end(self.finished)
        values = self._s.policy.values
        self._s.decisions.add(self._record.plain(outcome, values, self._turn.waited_s, self._loop.time()))

    # ---- ways

    async def _first_way(self) -> AnswerPart:
        """The way that policy chooses, and once more where it failed only for what a node was thought to hold."""
        while True:
            await self._turn.go(Way(self._decide, self._start_first, self._refused))
            attempt = self._record.attempts[-1]
            try:
                return await self._first_of(attempt, late_after_s(self._record.decisions[-1]))
            except AttemptFailed as failure:
                self._note(attempt, failure)
                node = attempt.option.decode_node
                if failure.cause != PREFIX_GONE or node in self._holds_nothing:
                    raise
                self._holds_nothing.add(node)
                self._record.first_ways += 1

    def _decide(self) -> Decision:
        decision = self._s.policy.decide(self._facts(()))
        if not self._counted and not self._p.measures:
            self._s.meter.arrived(uncached_at_home(decision, self._p.facts.prompt_tokens))
        self._counted = True
        return decision

    def _start_first(self, decision: Decision) -> None:
        if not self._record.attempts and decision.chosen is not None:
            try:
                self._turn.check_slo(decision.chosen.predicted_ttft_s)
            except ApiError:
                self._refused(decision)
                raise
        self._start(decision, last=False)

    async def _fall_back(self, fallback: Fallback) -> Attempt:
        """The attempt at home, once there is room for it and while the budget has some. Raises ApiError 503."""

        def choose() -> Decision:
            return self._s.policy.fall_back(self._facts(fallback.without))

        def start(decision: Decision) -> None:
            try:
                fallback.spend(decision, self._loop.time())
            except ApiError:
                self._record.decisions.append(decision)
                raise
            self._start(decision, last=True)

        def refused(decision: Decision) -> None:
            self._refused(decision)
            fallback.refused()

        await self._turn.go(Way(choose, start, refused, last=True))
        return self._record.attempts[-1]

    def _refused(self, decision: Decision) -> None:
        self._record.decisions.append(decision)
        self._s.metrics.decisions.labels("none", decision.reason.value).inc()

    # ---- one attempt

    def _start(self, decision: Decision, last: bool) -> None:
        """Send it by the way chosen. Raises ApiError where there is none."""
        self._record.decisions.append(decision)
        kind = "none" if decision.chosen is None else "remote" if decision.remote else "local"
        self._s.metrics.decisions.labels(kind, decision.reason.value).inc()
        if decision.chosen is None:
            raise refusals.no_way(decision)
        number, priority = len(self._record.attempts) + 1, self._turn.rank(last)
        attempt = self._s.builder.build(self._p, decision.chosen, number, priority, self.deadline - self._loop.time())
        self._record.attempts.append(attempt)
        log.info(
            "dispatch id=%s attempt=%d cluster=%s prefill=%s decode=%s reason=%s",
            self._p.facts.request_id,
            attempt.number,
            attempt.option.cluster,
            attempt.option.prefill_node,
            attempt.option.decode_node,
            decision.reason.value,
        )
        self._dispatched_at = self._loop.time()
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
            raise self._too_late() from None
        now = self._record.first_at = self._loop.time()
        self._s.metrics.ttft.labels(self.route.route).observe(now - self._record.began)
        self._saw(item)
        self._count_transfer(attempt)
        self._learn(attempt, now)
        nodes = [node for node in (attempt.option.prefill_node, attempt.option.decode_node) if node is not None]
        for node in nodes:
            self._s.prefixes.sent(node, self._p.names, now)
        self._s.affinity.served(self._p.facts.tenant, self._p.session, nodes, now)
        self._s.waiting.kick()  # its prefill node has a slot again
        return item

    def _learn(self, attempt: Attempt, now: float) -> None:
        """How far the prediction was off, which a fallback's is for reasons of its own."""
        decision, option = self._record.decisions[-1], attempt.option
        if option.cluster is None or option.predicted_ttft_s is None or decision.reason is Reason.FALLBACK:
            return
        if attempt.before is not None and attempt.before.outcome != MOVED:
            return
        applied = next(cluster.ttft_ratio for cluster in decision.facts.clusters if cluster.name == option.cluster)
        ratio = self._s.registry.accuracy(option.cluster)
        ratio.observe(option.predicted_ttft_s / applied, now - self._dispatched_at, now)

    def _facts(self, without: set[str] | tuple[()]) -> Facts:
        now = self._loop.time()
        looked_at, held = self._held
        if now >= looked_at + LOOK_AGAIN_S:
            held = self._s.prefixes.matches(self._p.names, now)
            self._held = now, held
        if self._holds_nothing:
            held = {node: kept for node, kept in held.items() if node not in self._holds_nothing}
        return gather(self._s.registry, self._p.facts, self._s.threshold.tokens, now, without, held)

    # ---- accounting

    def _saw(self, item: AnswerPart) -> None:
        self._record.saw(item)
        if isinstance(item, Delta):
            if not self._p.measures:
                self._s.meter.spoke(self, len(item.token_ids), time.monotonic())
        elif isinstance(item, Finished) and item.prompt_tokens != len(self._p.token_ids):
            log.warning("usage differs id=%s node_says=%d", self._p.facts.request_id, item.prompt_tokens)
            self._s.metrics.usage_differs.inc()
            self._s.prefixes.distrust()

    def _note(self, attempt: Attempt, failure: AttemptFailed) -> None:
        attempt.close("failed", failure)
        self._s.metrics.failed(failure.stage, failure.cause)
        log.warning("attempt failed id=%s attempt=%d %s", self._p.facts.request_id, attempt.number, failure)

    def _count_moves(self) -> None:
        for attempt in self._record.attempts:
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
