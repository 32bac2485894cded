"""What operators see of clusters, nodes and keys: plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from gateway.clusters import Cluster
from gateway.keys import KeyEntry
from gateway.kv_audits import KvAudits
from gateway.kv_index import KvIndex
from gateway.registry import Registry
from gateway.sessions import NodeSession


def cluster_view(registry: Registry, audits: KvAudits, cluster: Cluster, now: float) -> dict[str, Any]:
    """One cluster with what is known of its nodes and its way here."""
    nodes = registry.nodes(cluster.name)
    state = registry.link(cluster.name)
    link, audited = state.facts(now), audits.of(cluster.name)
    return {
        "name": cluster.name,
        "local": cluster.local,
        "dial": cluster.dial.value,
        "state": cluster.state.value,
        "egress_gbps": cluster.egress_gbps,
        "region": cluster.terms.region,
        "residency": list(cluster.terms.residency),
        "endpoints": list(cluster.terms.endpoints),
        "models": list(cluster.terms.models),
        "trusted": cluster.terms.trusted,
        "prices": msgspec.to_builtins(cluster.terms.prices),
        "ttft_ratio": registry.accuracy(cluster.name).value(now),
        "created": cluster.created,
        "breaker": None if cluster.local else registry.breakers.cluster(cluster.name).state(now).value,
        "audits": None
        if cluster.local
        else {
            "passed": audited.passed,
            "failed": audited.failed,
            "worst": audited.worst,
            "flagged": cluster.security.flagged,
        },
        "nodes": len(nodes),
        "accepting": sum(node.accepting for node in nodes),
        "link": {
            "bytes_per_s": link.bytes_per_s,
            "rtt_s": link.rtt_s,
            "queued_bytes": link.queued_bytes,
            "fresh": link.fresh,
            "loss": link.loss,
            "congested": link.congested,
            "dead": state.dead(now),
            "utilisation": link.utilisation,
            "queueing_s": state.queueing_s,
            "probe_bytes": state.probe_bytes,
        },
    }


def node_view(registry: Registry, node: NodeSession, now: float) -> dict[str, Any]:
    """One joined node; ``heartbeat`` is None until it has sent one."""
    join = node.join
    return {
        "node_id": node.node_id,
        "incarnation": node.incarnation,
        "cluster": join.cluster,
        "role": join.role.name.lower(),
        "becoming": None if node.becoming is None else node.becoming.name.lower(),
        "role_epoch": join.role_epoch,
        "version": join.version,
        "kv_address": None if join.kv_address is None else f"{join.kv_address.host}:{join.kv_address.port}",
        "joined_s_ago": now - node.joined_at,
        "heard_s_ago": now - node.last_heard,
        "accepting": node.accepting,
        "breaker": registry.breakers.node(node).state(now).value,
        "jobs": len(node.jobs),
        "free_slots": node.free_slots,
        "max_running": join.max_running,
        "queued_tokens": node.queued_tokens,
        "prefill_tokens_per_s": node.speed.tokens_per_s,
        "codecs": [msgspec.structs.asdict(codec) for codec in node.codecs.facts(now)],
        "heartbeat": None if node.heartbeat is None else msgspec.to_builtins(node.heartbeat),
    }


def key_view(entry: KeyEntry) -> dict[str, Any]:
    """One key without its secret."""
    clusters, limits = entry.principal.clusters, entry.principal.limits
    return {
        "id": entry.id,
        "name": entry.principal.name,
        "role": entry.principal.role.value,
        "route_hint": entry.principal.route_hint,
        "clusters": None if clusters is None else sorted(clusters),
        "tenant": entry.principal.tenant,
        "share_cache": limits.share_cache,
        "regions": None if limits.regions is None else sorted(limits.regions),
        "barred": sorted(limits.barred),
        "trusted_only": limits.trusted_only or limits.share_cache,
        **msgspec.structs.asdict(limits.rates),
        "models": None if limits.models is None else sorted(limits.models),
        "expires": limits.expires,
        "token_budget": limits.token_budget,
        "created": entry.created,
    }


def prefix_view(index: KvIndex) -> dict[str, Any]:
    """The prefix index; ``hit_share`` is the share of looked-up tokens that a node held, None before the first."""
    figures = index.figures
    share = figures.matched_tokens / figures.asked_tokens if figures.asked_tokens else None
    known: dict[str, Any] = {"blocks": len(index.index), "bytes": index.nbytes, "affinity": index.trusted}
    known |= {"hit_share": share, "nodes": index.workers()}
    known |= asdict(figures)
    return known
