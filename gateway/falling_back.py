"""The one fallback of a request: which nodes it must do without, and what it may cost."""

from __future__ import annotations

from gateway import refusals
from gateway.attempts import Attempt
from gateway.failures import AttemptFailed
from gateway.registry import Registry
from gateway.services import Services
from kvcache.wire import Role
from scheduler.decision import Decision, Option
from scheduler.predict import compute_s


class Fallback:
    """After ``failure`` of ``attempt``, which went by ``route``."""

    def __init__(self, services: Services, attempt: Attempt, failure: AttemptFailed, route: str) -> None:
        self._s = services
        self._failure = failure
        self._route = route
        faulty = _faulty_decoder(services.registry, attempt, failure)
        self.without = {name for name in (attempt.option.prefill_node, faulty) if name}
        """Nodes that it does without."""

    def spend(self, decision: Decision, now: float) -> None:
        """Spend of the fallbacks' budget what this one costs. Raises ApiError 503 where it is spent."""
        if decision.chosen is None or self._s.budget.admit(now, *self._cost(decision.chosen)):
            self._s.metrics.fallbacks.labels("local" if decision.chosen else "refused").inc()
            return
        self._s.metrics.fallbacks.labels("over_budget").inc()
        raise refusals.over_budget(self._route, self._failure, self._s.budget.retry_after_s(now))

    def refused(self) -> None:
        """It was turned away before it could begin."""
        self._s.metrics.fallbacks.labels("refused").inc()

    def _cost(self, option: Option) -> tuple[float | None, int]:
        """Predicted prefill seconds of the fallback, and how many local nodes share the budget."""
        registry = self._s.registry
        on = registry.node(option.prefill_node or option.decode_node)
        curve = on.speed.curve if on else None
        role = Role.DECODE if option.prefill_node is None else Role.PREFILL
        seconds = compute_s(option.cached_tokens, option.cached_tokens + option.compute_increment, curve)
        return seconds, len(registry.nodes(registry.local_cluster, role))


def _faulty_decoder(registry: Registry, failed: Attempt, failure: AttemptFailed) -> str | None:
    """The decode node, where it was the one that failed and another could take over."""
    mine = failed.option.decode_node
    others = [n for n in registry.nodes(registry.local_cluster, Role.DECODE) if n.node_id != mine]
    blamed = failure.node_id == mine and failure.stage in ("node", "load", "decode")
    return mine if blamed and any(node.accepting for node in others) else None
