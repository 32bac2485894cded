"""How much of a prompt is cached nowhere at home: what thresholds, reports and the long-term loop call its length."""

from __future__ import annotations

import msgspec

from scheduler.facts import Facts


class KeptNode(msgspec.Struct, frozen=True, gc=False):
    """Of a node in a decision record."""

    cached_tokens: int = 0


class KeptCluster(msgspec.Struct, frozen=True, gc=False):
    """Of a cluster in a decision record."""

    local: bool
    nodes: tuple[KeptNode, ...]


class KeptRequest(msgspec.Struct, frozen=True, gc=False):
    """Of the request in a decision record."""

    prompt_tokens: int


class KeptFacts(msgspec.Struct, frozen=True, gc=False):
    """What it takes of the facts in a decision record, so that thousands of records are read quickly."""

    request: KeptRequest
    clusters: tuple[KeptCluster, ...]
    decode_nodes: tuple[KeptNode, ...]


class KeptDecision(msgspec.Struct, frozen=True, gc=False):
    """Of the decision in a record."""

    facts: KeptFacts


def uncached_at_home(facts: Facts | KeptFacts) -> int:
    """Tokens to prefill at the local node that has most of the prompt cached, whatever its role is now."""
    cached = [node.cached_tokens for cluster in facts.clusters if cluster.local for node in cluster.nodes]
    cached += [node.cached_tokens for node in facts.decode_nodes]
    return max(0, facts.request.prompt_tokens - 1 - max(cached, default=0))
