"""Facts for the scheduler from what the registry knows now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from gateway.kv_lookup import Held
from gateway.registry import Cluster, ClusterState, Registry
from gateway.sessions import NodeSession
from kvcache.wire import Role
from scheduler.facts import ClusterFacts, DecodeNodeFacts, Facts, PrefillNodeFacts, RequestFacts

NOTHING_HELD = Held(0, 0)


def gather(
    registry: Registry,
    request: RequestFacts,
    threshold_tokens: int,
    now: float,
    without: Collection[str] = (),
    held: Mapping[str, Held] = MappingProxyType({}),
) -> Facts:
    """What a decision may know; nodes named in ``without`` failed this request already and are left out.

    ``held`` is what nodes have of the prompt.
    """
    clusters = tuple(_cluster(registry, cluster, now, without, held) for cluster in registry.clusters)
    decoders = tuple(
        _decoder(node, now, held.get(node.node_id, NOTHING_HELD))
        for node in registry.nodes(registry.local_cluster, Role.DECODE)
        if node.accepting and node.node_id not in without
    )
    return Facts(request, clusters, decoders, threshold_tokens)


def _cluster(
    registry: Registry, cluster: Cluster, now: float, without: Collection[str], held: Mapping[str, Held]
) -> ClusterFacts:
    nodes = tuple(
        _prefiller(registry, node, now, held.get(node.node_id, NOTHING_HELD))
        for node in registry.nodes(cluster.name, Role.PREFILL)
        if node.accepting and node.node_id not in without
    )
    reachable = cluster.state is ClusterState.ACTIVE and bool(nodes)
    link = registry.link(cluster.name)
    link.wanted(now)
    return ClusterFacts(cluster.name, cluster.local, reachable, nodes, link.facts(now))


def _prefiller(registry: Registry, node: NodeSession, now: float, held: Held) -> PrefillNodeFacts:
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
        dp_rank=held.dp_rank,
    )


def _decoder(node: NodeSession, now: float, held: Held) -> DecodeNodeFacts:
    """A transfer leaves out only what the node itself says that it holds: it would fail for what was a guess."""
    running = max(len(node.jobs), node.heartbeat.running if node.heartbeat else 0)
    return DecodeNodeFacts(
        node.node_id,
        running,
        node.free_slots,
        node.speed.curve,
        held.resumable,
        held.held if held.exact else 0,
        codecs=node.codecs.facts(now),
        dp_rank=held.dp_rank,
    )
