"""Policies to compare with. Each is a way of asking the routing policy, so nodes, codecs and privileges are the same.

A hint says which side may be used; which node of it, and which decode node, the policy says as it always does.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from scheduler.decision import Decision
from scheduler.facts import Facts, RouteHint
from scheduler.policy import RoutingPolicy


@dataclass(frozen=True, slots=True)
class Static:
    """Whatever is above a threshold goes away, come what may. inf keeps all at home, below 0 sends all away (naive)."""

    policy: RoutingPolicy
    threshold_tokens: float

    def decide(self, facts: Facts) -> Decision:
        """Look at nothing but the length that no local prefill node has cached."""
        cached = (node.cached_tokens for cluster in facts.clusters if cluster.local for node in cluster.nodes)
        away = facts.request.prompt_tokens - 1 - max(cached, default=0) > self.threshold_tokens
        hint = RouteHint.REMOTE if away else RouteHint.LOCAL
        return self.policy.decide(replace(facts, request=replace(facts.request, hint=hint)))

    def fall_back(self, facts: Facts) -> Decision:
        """As the policy does."""
        return self.policy.fall_back(facts)
