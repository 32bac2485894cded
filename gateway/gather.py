"""Facts for the scheduler from what the registry knows now."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from operator import attrgetter
from types import MappingProxyType

from gateway.clusters import Cluster, ClusterState
from gateway.kv_lookup import Held
from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.held import FILES
from kvcache.wire import Role
from scheduler.candidates import KEEP, candidates
from scheduler.facts import ClusterFacts, DecodeNodeFacts, Facts, PrefillNodeFacts, RequestFacts
from scheduler.sizes import kept_bytes

NOTHING_HELD = Held(0, 0)
_by_tokens = attrgetter("queued_tokens")


def gather(
    registry: Registry,
    request: RequestFacts,
    threshold_tokens: int,
    now: float,
    without: Collection[str] = (),
    held: Mapping[str, Held] = MappingProxyType({}),
) -> Facts:
    """What a decision may know; nodes named in ``without`` failed this request already and are left out.

    ``held`` is what nodes have of the prompt. Of large clusters only candidates become facts.
    """
    most = {node: kept.held for node, kept in held.items()}
    clusters = tuple(_cluster(registry, request, cluster, now, without, held, most) for cluster in registry.clusters)
    nodes = registry.nodes(registry.local_cluster, Role.DECODE)
    accepting = [node for node in nodes if node.accepting and node.node_id not in without]
    admitted, suspended = _by_breaker(registry, accepting, now)
    chosen = candidates(admitted, _running, most, request.session_nodes) + suspended[:KEEP]
    decoders = tuple(
        _decoder(node, request, now, held.get(node.node_id, NOTHING_HELD), node in suspended) for node in chosen
    )
    can_move = all(any(node.moves for c in clusters if c.local is home for node in c.nodes) for home in (True, False))
    return Facts(request, clusters, decoders, threshold_tokens, time.gmtime().tm_hour, can_move)


def _cluster(
    registry: Registry,
    request: RequestFacts,
    cluster: Cluster,
    now: float,
    without: Collection[str],
    held: Mapping[str, Held],
    most: Mapping[str, int],
) -> ClusterFacts:
    nodes = registry.nodes(cluster.name, Role.PREFILL)
    accepting = [node for node in nodes if node.accepting and node.node_id not in without]
    admitted, suspended = _by_breaker(registry, accepting, now)
    chosen = candidates(admitted, _by_tokens, most, request.session_nodes) + suspended[:KEEP]
    link, outward = registry.link(cluster.name), None
    link.wanted(now)
    if not cluster.local:
        way = registry.outward(cluster.name)
        if held:
            way.wanted(now)
        outward = way.facts(now)
    return ClusterFacts(
        cluster.name,
        cluster.local,
        cluster.state is ClusterState.ACTIVE and bool(accepting),
        tuple(
            _prefiller(registry, node, request, now, held.get(node.node_id, NOTHING_HELD), node in suspended)
            for node in chosen
        ),
        link.facts(now),
        cluster.terms.region,
        cluster.terms.trusted,
        cluster.terms.prices,
        registry.accuracy(cluster.name).value(now),
        outward,
        not cluster.local and not registry.breakers.cluster(cluster.name).admits(now),
        cluster.terms.residency,
    )


def _by_breaker(
    registry: Registry, nodes: list[NodeSession], now: float
) -> tuple[list[NodeSession], list[NodeSession]]:
    """Those that their breakers let work through to, and those that they do not."""
    suspended = [node for node in nodes if not registry.breakers.node(node).admits(now)]
    return [node for node in nodes if node not in suspended] if suspended else nodes, suspended


def _running(node: NodeSession) -> int:
    return max(len(node.jobs), node.heartbeat.running if node.heartbeat else 0)


def _prefiller(
    registry: Registry, node: NodeSession, request: RequestFacts, now: float, held: Held, suspended: bool
) -> PrefillNodeFacts:
    """What it holds is moved, and left out of what is moved there, only where it says so itself."""
    return PrefillNodeFacts(
        node.node_id,
        node.queued_tokens,
        node.free_slots,
        node.speed.curve,
        held.resumable,
        held.held,
        codecs=node.codecs.facts(now),
        egress_bytes_per_s=registry.lease(node) or None,
        encoders=max(1, node.join.encoders),
        queued_s=node.queued_s(now),
        dp_rank=held.dp_rank,
        moves=node.join.moves and held.exact,
        dialable=node.join.kv_address is not None,
        suspended=suspended,
        reload_s=_reload_s(node, request, held),
        last_s=node.sent_s(now, last=True),
    )


def _decoder(node: NodeSession, request: RequestFacts, now: float, held: Held, suspended: bool) -> DecodeNodeFacts:
    """A transfer leaves out only what the node itself says that it holds: it would fail for what was a guess."""
    return DecodeNodeFacts(
        node.node_id,
        _running(node),
        node.free_slots,
        node.speed.curve,
        held.resumable,
        held.held if held.exact else 0,
        codecs=node.codecs.facts(now),
        dp_rank=held.dp_rank,
        suspended=suspended,
        reload_s=_reload_s(node, request, held),
    )


def _reload_s(node: NodeSession, request: RequestFacts, held: Held) -> float:
    """To read what of the prompt lies in files there; nothing while the node has not read any yet."""
    if not (held.in_files or held.end_in_files) or node.heartbeat is None:
        return 0.0
    rates = [tier.read_bytes_per_s for tier in node.heartbeat.tiers if tier.medium == FILES]
    slowest = min((rate for rate in rates if rate >= 1.0), default=0.0)
    return kept_bytes(request.sizes, held.in_files, held.end_in_files) / slowest if slowest else 0.0
