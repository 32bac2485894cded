"""The life of one request: decide, sign, dispatch, wait, fall back, speak, and always let go.

Until the first token a failure may be mended by one fallback at home. After it there is no retry: the answer ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.affinity import Affinity
from gateway.attempts import Attempt, AttemptFailed
from gateway.building import AttemptBuilder, Prompted
from gateway.config import FallbackPolicy, GatewayConfig
from gateway.decisions import Decisions
from gateway.errors import ApiError
from gateway.gather import gather
from gateway.kv_lookup import Held, PrefixLookup
from gateway.metrics import Metrics
from gateway.model import ServedModel
from gateway.moving import MOVED, patience_s
from gateway.registry import Registry
from gateway.threshold import Threshold
from gateway.traffic import TrafficMeter, uncached_at_home
from gateway.waiting import WaitingRoom
from kvcache.control import Delta, Finished
from kvcache.wire import Role
from scheduler.admission.fair_queue import Waiting, rank
from scheduler.admission.holding import SHORT_S, held_back, waits_for_room
from scheduler.admission.work import Yardstick
from scheduler.budget import FallbackBudget
from scheduler.decision import Decision, Option, Reason
from scheduler.facts import Facts, RequestFacts
from scheduler.policy import RoutingPolicy
from scheduler.predict import compute_s
from scheduler.replay import SCHEMA

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""How long what the prefix index said of a prompt is taken for true while the prompt waits."""
PREFIX_GONE = "prefix_gone"
"""A decode node's word that it no longer holds what a transfer left out."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Services:
    """What every request shares."""

    config: GatewayConfig
    model: ServedModel
    registry: Registry
    policy: RoutingPolicy
    budget: FallbackBudget
    builder: AttemptBuilder
    decisions: Decisions
    metrics: Metrics
    threshold: Threshold
    meter: TrafficMeter
    prefixes: PrefixLookup
    affinity: Affinity
    waiting: WaitingRoom


@dataclass(frozen=True, slots=True)
class Route:
    """What the response headers say. ``codec`` is ``none`` where no KV was sent."""

    route: str
    reason: str
    prefill: str
    codec: str


class RequestLife:
    """Call ``first``, then ``following`` until Finished, and in any case ``close``."""

    def __init__(self, services: Services, prompted: Prompted) -> None:
        self._s = services
        self._p = prompted
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._began_wall = time.time()
        self.deadline = self._began + services.config.request_timeout_s
        self._attempts: list[Attempt] = []
        self._decisions: list[Decision] = []
        self._holds_nothing: set[str] = set()
        self._dispatched_at = self._began
        self._first_at: float | None = None
        self._finished: Finished | None = None
        self._failure: AttemptFailed | None = None
        self._turned_away: Decision | None = None
        self._yardstick: Yardstick | None = None
        self._charged_s: float | None = None
        self._on_nodes: list[float] = []
        self._waited_s = 0.0
        self._spoken: int | None = None
        self._held: tuple[float, Mapping[str, Held]] = (float("-inf"), {})
        self._closed = False

    @property
    def route(self) -> Route:
        """The way that the last attempt took."""
        attempt = self._attempts[-1]
        decision = self._decisions[attempt.number - 1]  # a later one may have been refused
        name = f"remote:{attempt.option.cluster}" if decision.remote else "local"
        prefill = "in-place" if attempt.leg is None else "node"
        return Route(name, decision.reason.value, prefill, attempt.codec or "none")

    @property
    def finished(self) -> Finished | None:
        """How the answer ended, once it ended well."""
        return self._finished

    @property
    def spoken(self) -> int | None:
        """Tokens of the answer that came so far; None before the first."""
        return self._spoken

    async def first(self) -> Delta | Finished:
        """The first piece of the answer, by the first way or the fallback. Raises ApiError."""
        try:
            return await self._first_way()
        except AttemptFailed as failure:
            attempt = self._attempts[-1]
            if self._s.config.fallback is FallbackPolicy.FAIL:
                self._s.metrics.fallbacks.labels("forbidden").inc()
                raise _unavailable(
                    f"the {self.route.route} way failed: {failure.stage}: {failure.cause}", failure.cause
                ) from failure
            attempt = await self._fall_back(attempt, failure)
        try:
            return await self._first_of(attempt, None)
        except AttemptFailed as failure:
            self._note(attempt, failure)
            raise _unavailable(f"the fallback failed too: {failure.stage}: {failure.cause}", failure.cause) from failure

    async def _first_way(self) -> Delta | Finished:
        """The way that policy chooses, and once more where it failed only for what a node was thought to hold."""
        while True:
            attempt = await self._sent(lambda: self._s.policy.decide(self._facts(())), last=False)
            try:
                return await self._first_of(attempt, self._late_after(self._decisions[-1]))
            except AttemptFailed as failure:
                self._note(attempt, failure)
                node = attempt.option.decode_node
                if failure.cause != PREFIX_GONE or node in self._holds_nothing:
                    raise
                self._holds_nothing.add(node)

    async def following(self) -> Delta | Finished:
        """The next piece after the first, up to Finished. Raises ApiError when the answer breaks off."""
        attempt = self._attempts[-1]
        before = self._loop.time()
        try:
            item = await attempt.next(max(0.0, self.deadline - before))
        except TimeoutError:
            raise self._too_late() from None
        except AttemptFailed as failure:
            self._note(attempt, failure)
            raise _unavailable(f"the answer broke off: {failure.stage}: {failure.cause}", failure.cause) from failure
        self._s.metrics.gap.observe(self._loop.time() - before)
        self._saw(item)
        return item

    def close(self, outcome: str) -> None:
        """Let go of everything and keep the record. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._p.measures:
            self._s.meter.ended(self, self._finished is not None)
        if self._finished is not None:
            outcome = "finished"
        if self._attempts:
            self._attempts[-1].close(outcome)
        self._count_moves()
        self._settle()
        for work_s in self._on_nodes:
            self._s.waiting.back(self._p.account, work_s)
        self._s.decisions.add(self._record(outcome))

    # ---- its turn

    async def _sent(self, choose: Callable[[], Decision], last: bool) -> Attempt:
        """The attempt that was sent by a way of ``choose``: at once where there is room, else when its turn has come.

        ``last``: after all that is not. Raises ApiError.
        """
        decision = choose()
        if not self._decisions and not self._p.measures:
            self._s.meter.arrived(uncached_at_home(decision, self._p.facts.prompt_tokens))
        yardstick = self._yardstick = Yardstick(decision.facts)
        work_s, p = yardstick.expected_s(self._p.expected_output), self._p
        hopeless = decision.chosen is None and not waits_for_room(decision)
        if hopeless or not (self._s.waiting.anybody_before(last) or _waits(decision)):
            attempt = self._start(decision, work_s, last)
            self._s.waiting.passed(p.account, work_s, p.weight)
            self._charged_s = None
            return attempt
        self._turned_away = decision

        def start() -> bool:
            found = choose()
            if _waits(found):
                self._turned_away = found
                return False
            self._turned_away = None
            self._start(found, work_s, last)
            return True

        away = yardstick.uncached_tokens > decision.facts.threshold_tokens
        needs = (_placed_like(p.facts), away, yardstick.prefill_s > SHORT_S)
        order = rank(self._began, work_s, p.priority)
        entry = Waiting(p.account, work_s, len(p.token_ids), order, p.weight, needs, last)
        before = self._loop.time()
        try:
            await self._s.waiting.wait(entry, start, self._patience_s(entry))
        except ApiError:
            if self._turned_away is not None:
                self._refuse(self._turned_away)
                if last:
                    self._s.metrics.fallbacks.labels("refused").inc()
            raise
        finally:
            self._waited_s += self._loop.time() - before
        self._charged_s = work_s
        return self._attempts[-1]

    def _patience_s(self, entry: Waiting) -> float:
        """How long it may wait. Raises ApiError where its first token would come later than its client wants it."""
        left = self.deadline - self._loop.time()
        slo = self._p.ttft_slo_s
        if slo is None:
            return left
        left = min(left, self._began + slo - self._loop.time())
        expected = self._s.waiting.wait_s(entry)
        if expected is not None and expected > left:
            raise self._beyond_slo(slo, expected, f"{expected:.3g} s in the queue")
        return left

    def _beyond_slo(self, slo: float, expected_s: float, what: str) -> ApiError:
        text = f"the first token is predicted later than the {slo:g} s that the request allows: {what}"
        return self._s.waiting.refused("slo_unattainable", 503, text, expected_s)

    def _refuse(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._s.metrics.decisions.labels("none", decision.reason.value).inc()

    # ---- one attempt

    def _start(self, decision: Decision, work_s: float, last: bool) -> Attempt:
        """Send it by the way chosen. Raises ApiError where there is none, or it would be too late for its client."""
        if last:
            self._spend(decision)
        slo, predicted = self._p.ttft_slo_s, None if decision.chosen is None else decision.chosen.predicted_ttft_s
        if slo is not None and predicted is not None and not self._attempts:
            expected = self._loop.time() - self._began + predicted
            if expected > slo:
                self._refuse(decision)
                raise self._beyond_slo(slo, expected, f"{expected:.3g} s")
        self._decisions.append(decision)
        kind = "none" if decision.chosen is None else "remote" if decision.remote else "local"
        self._s.metrics.decisions.labels(kind, decision.reason.value).inc()
        if decision.chosen is None:
            raise _refused(decision)
        number = len(self._attempts) + 1
        priority = self._s.waiting.send(self._p.account, work_s, self._p.weight, last)
        self._on_nodes.append(work_s)
        attempt = self._s.builder.build(self._p, decision.chosen, number, priority, self.deadline - self._loop.time())
        self._attempts.append(attempt)
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
        return attempt

    async def _first_of(self, attempt: Attempt, late_after_s: float | None) -> Delta | Finished:
        """Wait for the first piece. Raises AttemptFailed, also for a late attempt, and ApiError at the deadline."""
        left = self.deadline - self._loop.time()
        patience = left if late_after_s is None else min(left, late_after_s)
        try:
            item = await attempt.next(max(0.0, patience))
        except TimeoutError:
            if patience < left:
                self._learn(attempt, self._loop.time())
                late = AttemptFailed("wait", "late", f"no token after {patience:.1f} s")
                attempt.close("late", late)
                raise late from None
            raise self._too_late() from None
        self._first_at = self._loop.time()
        self._s.metrics.ttft.labels(self.route.route).observe(self._first_at - self._began)
        self._saw(item)
        self._count_transfer(attempt)
        self._learn(attempt, self._first_at)
        nodes = [node for node in (attempt.option.prefill_node, attempt.option.decode_node) if node is not None]
        for node in nodes:
            self._s.prefixes.sent(node, self._p.names, self._first_at)
        self._s.affinity.served(self._p.facts.tenant, self._p.session, nodes, self._first_at)
        self._s.waiting.kick()  # its prefill node has a slot again
        return item

    def _learn(self, attempt: Attempt, now: float) -> None:
        """How far the prediction was off, which a fallback's is for reasons of its own."""
        decision, option = self._decisions[-1], attempt.option
        if option.cluster is None or option.predicted_ttft_s is None or decision.reason is Reason.FALLBACK:
            return
        if attempt.before is not None and attempt.before.outcome != MOVED:
            return
        applied = next(cluster.ttft_ratio for cluster in decision.facts.clusters if cluster.name == option.cluster)
        ratio = self._s.registry.accuracy(option.cluster)
        ratio.observe(option.predicted_ttft_s / applied, now - self._dispatched_at, now)

    async def _fall_back(self, failed: Attempt, failure: AttemptFailed) -> Attempt:
        """The attempt at home, once there is room for it and while the budget has some. Raises ApiError 503."""
        without = {name for name in (failed.option.prefill_node, self._faulty_decoder(failed, failure)) if name}
        self._failure = failure
        return await self._sent(lambda: self._s.policy.fall_back(self._facts(without)), last=True)

    def _spend(self, decision: Decision) -> None:
        """Spend of the fallbacks' budget what this one costs. Raises ApiError 503 where it is spent."""
        now, failure = self._loop.time(), self._failure
        if decision.chosen is None or self._s.budget.admit(now, *self._cost(decision.chosen)):
            self._s.metrics.fallbacks.labels("local" if decision.chosen else "refused").inc()
            return
        assert failure is not None
        self._decisions.append(decision)
        self._s.metrics.fallbacks.labels("over_budget").inc()
        why = f"{failure.stage}: {failure.cause}"
        raise ApiError(
            503,
            f"the {self.route.route} way failed ({why}) and the budget for prefilling at home is spent",
            code="fallback_budget_exhausted",
            retry_after_s=self._s.budget.retry_after_s(now),
        )

    def _cost(self, option: Option) -> tuple[float | None, int]:
        """Predicted prefill seconds of the fallback, and how many local nodes share the budget."""
        on = self._s.registry.node(option.prefill_node or option.decode_node)
        curve = on.speed.curve if on else None
        role = Role.DECODE if option.prefill_node is None else Role.PREFILL
        return compute_s(option.cached_tokens, option.cached_tokens + option.compute_increment, curve), len(
            self._s.registry.nodes(self._s.registry.local_cluster, role)
        )

    def _faulty_decoder(self, failed: Attempt, failure: AttemptFailed) -> str | None:
        """The decode node, where it was the one that failed and another could take over."""
        mine = failed.option.decode_node
        others = [n for n in self._s.registry.nodes(self._s.registry.local_cluster, Role.DECODE) if n.node_id != mine]
        blamed = failure.node_id == mine and failure.stage in ("node", "load", "decode")
        return mine if blamed and any(node.accepting for node in others) else None

    def _late_after(self, decision: Decision) -> float | None:
        """Seconds after which a remote attempt is late; None where nothing was predicted: then the deadline alone."""
        if not decision.remote or decision.chosen is None or decision.chosen.predicted_ttft_s is None:
            return None
        predicted = decision.chosen.predicted_ttft_s
        if decision.chosen.move is not None:
            unmoved = _without_move(decision, decision.chosen)
            if unmoved is None:
                return None
            predicted = max(predicted, patience_s(decision.chosen.move) + unmoved)
        return max(2 * predicted, predicted + 2.0)

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

    def _settle(self) -> None:
        """Charge the account for what was done instead of what was expected; where nobody waited nothing is owed."""
        done = self._finished
        if done is not None and self._yardstick is not None and self._charged_s is not None:
            spent = self._yardstick.spent_s(done.cached_tokens, done.completion_tokens)
            self._s.waiting.settle(self._p.account, spent - self._charged_s, self._p.weight)

    def _saw(self, item: Delta | Finished) -> None:
        if isinstance(item, Delta):
            self._spoken = (self._spoken or 0) + len(item.token_ids)
            if not self._p.measures:
                self._s.meter.spoke(self, len(item.token_ids), time.monotonic())
        else:
            self._finished = item
            self._spoken = item.completion_tokens
            if item.prompt_tokens != len(self._p.token_ids):
                log.warning("usage differs id=%s node_says=%d", self._p.facts.request_id, item.prompt_tokens)
                self._s.metrics.usage_differs.inc()
                self._s.prefixes.distrust()

    def _note(self, attempt: Attempt, failure: AttemptFailed) -> None:
        attempt.close("failed", failure)
        self._s.metrics.failed(failure.stage, failure.cause)
        log.warning("attempt failed id=%s attempt=%d %s", self._p.facts.request_id, attempt.number, failure)

    def _count_moves(self) -> None:
        for attempt in self._attempts:
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
        limit = self._s.config.request_timeout_s
        return ApiError(504, f"no answer within {limit:g} s", code="request_timeout")

    def _record(self, outcome: str) -> dict[str, Any]:
        ttft = None if self._first_at is None else self._first_at - self._began
        done = self._finished
        rate = None
        if done is not None and self._first_at is not None and done.completion_tokens > 1:
            spoken = self._loop.time() - self._first_at
            rate = (done.completion_tokens - 1) / spoken if spoken > 0 else None
        usage = None
        if done is not None:
            usage = {
                "prompt_tokens": done.prompt_tokens,
                "completion_tokens": done.completion_tokens,
                "cached_tokens": done.cached_tokens,
            }
        first_ways = 1 + len(self._holds_nothing)
        record = {
            "schema": SCHEMA,
            "id": self._p.facts.request_id,
            "request_id": self._p.request_id,
            "at": self._began_wall,
            "endpoint": self._p.endpoint,
            "measures": self._p.measures,
            "policy": self._s.policy.values,
            "decision": self._decisions[0] if self._decisions else None,
            "retried": self._decisions[1:first_ways],
            "fallback_decision": self._decisions[first_ways] if len(self._decisions) > first_ways else None,
            "attempts": [attempt.record() for attempt in self._attempts],
            "route": self.route.route if self._attempts else None,
            "fallback": len(self._attempts) > first_ways,
            "outcome": outcome,
            "ttft_s": ttft,
            "queue_s": self._waited_s,
            "tokens_per_s": rate,
            "usage": usage,
            "finish": None if done is None else done.reason,
        }
        plain: dict[str, Any] = msgspec.to_builtins(record, order="deterministic", str_keys=True)
        return plain


def _waits(decision: Decision) -> bool:
    """Whether it is only for want of room that the request can't be sent now, or is better not."""
    return waits_for_room(decision) or held_back(decision)


def _placed_like(facts: RequestFacts) -> tuple[object, ...]:
    """What two requests have in common that can be placed on the same nodes."""
    where = (facts.allowed_clusters, facts.barred_clusters, facts.regions, facts.trusted_only)
    return (facts.hint, facts.hint_cluster, facts.lora, *where)


def _without_move(decision: Decision, chosen: Option) -> float | None:
    """The predicted TTFT of the same way where its prefix does not come."""
    return next(
        (o.predicted_ttft_s for o in decision.options if o.prefill_node == chosen.prefill_node and o.move is None), None
    )


def _refused(decision: Decision) -> ApiError:
    word = decision.reason.value
    cures = {
        "no_decode_node": "no decode node accepts work; start one with `prfaas node --role decode`",
        "hinted_cluster_unavailable": "the hinted cluster has no prefill node that accepts work",
        "overloaded": "all nodes are full; add nodes, or try again later",
        "residency": "this key's prompts may not be where this gateway decodes; set its region with "
        "`prfaas clusters set`, or use a gateway there",
    }
    if decision.reason is Reason.RESIDENCY:
        return ApiError(403, cures[word], code=word)
    return ApiError(503, cures[word], code=word, retry_after_s=RETRY_AFTER_S)


def _unavailable(message: str, cause: str) -> ApiError:
    return ApiError(503, message, code=cause, retry_after_s=RETRY_AFTER_S)
