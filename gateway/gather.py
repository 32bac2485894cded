"""Facts for the scheduler from what the registry knows now."""

from __future__ import annotations

from collections.abc import Collection

from gateway.registry import Cluster, ClusterState, Registry
from gateway.sessions import NodeSession
from kvcache.wire import Role
from scheduler.facts import ClusterFacts, DecodeNodeFacts, Facts, PrefillNodeFacts, RequestFacts


def gather(
    registry: Registry, request: RequestFacts, threshold_tokens: int, now: float, without: Collection[str] = ()
) -> Facts:
    """What a decision may know; nodes named in ``without`` failed this request already and are left out."""
    clusters = tuple(_cluster(registry, cluster, now, without) for cluster in registry.clusters)
    decoders = tuple(
        _decoder(node, now)
        for node in registry.nodes(registry.local_cluster, Role.DECODE)
        if node.accepting and node.node_id not in without
    )
    return Facts(request, clusters, decoders, threshold_tokens)


def _cluster(registry: Registry, cluster: Cluster, now: float, without: Collection[str]) -> ClusterFacts:
    nodes = tuple(
        PrefillNodeFacts(
            node.node_id,
            node.queued_tokens,
            node.free_slots,
            node.speed.curve,
            codecs=node.codecs.facts(now),
            egress_bytes_per_s=registry.lease(node) or None,
            encoders=max(1, node.join.encoders),
        )
        for node in registry.nodes(cluster.name, Role.PREFILL)
        if node.accepting and node.node_id not in without
    )
    reachable = cluster.state is ClusterState.ACTIVE and bool(nodes)
    link = registry.link(cluster.name)
    link.wanted(now)
    return ClusterFacts(cluster.name, cluster.local, reachable, nodes, link.facts(now))


def _decoder(node: NodeSession, now: float) -> DecodeNodeFacts:
    running = max(len(node.jobs), node.heartbeat.running if node.heartbeat else 0)
    codecs = node.codecs.facts(now)
    return DecodeNodeFacts(node.node_id, running, node.free_slots, node.speed.curve, codecs=codecs)
