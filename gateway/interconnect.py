"""The interconnect of every cluster, from what its nodes say when they join, and the routes in it.

For each transfer inside a cluster the routes order the transports that both nodes have. The nodes take the first that
works; what it took, and what failed before it, corrects the routes, as does what connections deliver.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from prometheus_client import Counter

from gateway.ordered_ways import OrderedWays
from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.topology import MachineReport, decode_report
from kvcache.wire import Role
from scheduler.topology.claims import Refusal
from scheduler.topology.graph import Interconnect
from scheduler.topology.paths import Endpoint, Transport
from scheduler.topology.routes import Route, Routes

log = logging.getLogger(__name__)

MAX_SHOWN = 256
"""Pairs of nodes in one answer."""


@dataclass(slots=True)
class _Cluster:
    graph: Interconnect = field(default_factory=Interconnect)
    refused: dict[str, Refusal] = field(default_factory=dict)
    routes: Routes = field(init=False)

    def __post_init__(self) -> None:
        self.routes = Routes(self.graph)


class Interconnects:
    """One graph and its routes for each cluster that has nodes. All calls come from the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._clusters: dict[str, _Cluster] = {}
        self.transfers = Counter(
            "prfaas_kv_transport",
            "Transfers by what carried or failed them",
            ["transport", "outcome"],
            registry=None,
        )

    def joined(self, session: NodeSession) -> None:
        """Take what a node said of its machine. What cannot be so is refused by name; the node serves all the same."""
        if not session.join.topology:
            return
        name, node = session.join.cluster, session.node_id
        cluster = self._clusters.setdefault(name, _Cluster())
        try:
            refusal = cluster.graph.tell(node, decode_report(session.join.topology))
        except ValueError as error:
            cluster.graph.forget(node)
            refusal = Refusal(node, "topology", f"cannot be read: {error}")
        cluster.refused.pop(node, None)
        if refusal is not None:
            cluster.refused[node] = refusal
            log.warning("topology refused node=%s field=%r reason=%r", node, refusal.field, refusal.reason)

    def lost(self, session: NodeSession) -> None:
        """A stream ended; where the node came back meanwhile, what it said then stands."""
        if self._registry.node(session.node_id) is not None:
            return
        cluster = self._clusters.get(session.join.cluster)
        if cluster is not None:
            cluster.graph.forget(session.node_id)
            cluster.routes.forget(session.node_id)
            cluster.refused.pop(session.node_id, None)

    def heard(self, session: NodeSession, now: float) -> None:
        """Learn from a heartbeat how fast TCP really is to each peer of the same cluster."""
        cluster = self._clusters.get(session.join.cluster)
        if cluster is None or session.heartbeat is None:
            return
        for link in session.heartbeat.links:
            peer = self._registry.node(link.peer_node)
            if peer is not None and peer.join.cluster == session.join.cluster and not link.app_limited:
                here, there = Endpoint(session.node_id), Endpoint(peer.node_id)
                cluster.routes.measured(here, there, Transport.TCP, link.delivery_bytes_per_s, now)

    def order(self, source: NodeSession, target: NodeSession, nbytes: int) -> OrderedWays:
        """The transports for a transfer of about so many bytes, by what is known now."""
        ends = source.node_id, target.node_id
        cluster = self._clusters.get(source.join.cluster)
        if cluster is None or source.join.cluster != target.join.cluster:
            return OrderedWays((), None, ends, self.transfers)
        return OrderedWays(
            _ordered(cluster.routes, source, target, nbytes, time.monotonic()), cluster.routes, ends, self.transfers
        )

    def view(self, nbytes: int, now: float) -> dict[str, Any]:
        """Per cluster its machines, what was refused, and the routes of ``nbytes`` from prefill to decode nodes."""
        return {
            name: self._cluster_view(name, cluster, nbytes, now) for name, cluster in sorted(self._clusters.items())
        }

    def _cluster_view(self, name: str, cluster: _Cluster, nbytes: int, now: float) -> dict[str, Any]:
        nodes = self._registry.nodes(name)
        machines = {
            node.node_id: msgspec.to_builtins(report)
            for node in nodes
            if (report := cluster.graph.report(node.node_id)) is not None
        }
        pairs = (
            (one, other)
            for one in nodes
            for other in nodes
            if (one.join.role, other.join.role) == (Role.PREFILL, Role.DECODE)
        )
        return {
            "machines": machines,
            "refused": [
                {"node": refusal.node_id, "field": refusal.field, "reason": refusal.reason}
                for refusal in cluster.refused.values()
            ],
            "bytes": nbytes,
            "routes": [self._route_view(cluster, a, b, nbytes, now) for a, b in islice(pairs, MAX_SHOWN)],
        }

    def _route_view(
        self, cluster: _Cluster, source: NodeSession, target: NodeSession, nbytes: int, now: float
    ) -> dict[str, Any]:
        """From host memory to host memory, which is where KV lies, and between the first GPUs where both have some.

        ``order`` is what the next transfer is told to try.
        """
        a, b = source.node_id, target.node_id
        order = _ordered(cluster.routes, source, target, nbytes, now) or (Transport.TCP.value,)
        memory = cluster.routes.choose(Endpoint(a), Endpoint(b), nbytes, now)
        gpus = [_first_gpu(cluster.graph.report(node)) for node in (a, b)]
        between_gpus = None
        if None not in gpus:
            ends = Endpoint(a, gpus[0]), Endpoint(b, gpus[1])
            between_gpus = _ways(cluster.routes.choose(*ends, nbytes, now))
        return {"from": a, "to": b, "order": order, "host_memory": _ways(memory), "gpus": between_gpus}


def _ordered(routes: Routes, source: NodeSession, target: NodeSession, nbytes: int, now: float) -> tuple[str, ...]:
    """What both nodes have, the least cost first; () where that is TCP alone."""
    offered = {way for way in Transport if way in source.join.transports and way in target.join.transports}
    if not offered - {Transport.TCP}:
        return ()
    route = routes.choose(Endpoint(source.node_id), Endpoint(target.node_id), nbytes, now, offered | {Transport.TCP})
    return tuple(cost.path.transport.value for cost in route.costs)


def _first_gpu(report: MachineReport | None) -> int | None:
    return report.gpus[0].index if report is not None and report.gpus else None


def _ways(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "transport": cost.path.transport.value,
            "cost_s": cost.seconds,
            "nominal_s": cost.nominal_s,
            "slowdown": cost.slowdown,
            "failures_s": cost.failures_s,
            "bytes_per_s": cost.path.bytes_per_s,
            "assumed": cost.path.assumed,
            "why": cost.path.why,
        }
        for cost in route.costs
    ]
