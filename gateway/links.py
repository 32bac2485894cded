"""What heartbeats tell of the links between clusters, and whom to ask for a probe of one that is idle."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.control import LinkReport, ProbeLink
from kvcache.wire import Role
from scheduler.links import PathReport


def heard(registry: Registry, session: NodeSession, now: float) -> None:
    """Take what a node's last heartbeat says of its KV peers; ask it for a probe where one is due.

    A prefill node tells what it sends to the local decode nodes, a local node of its round trips to whoever sends.
    """
    if session.join.role is Role.PREFILL:
        _learn_sending(registry, session, now)
    if session.join.cluster == registry.local_cluster:
        for report, peer in _peers(registry, session):
            registry.link(peer.join.cluster).observe_rtt(report.rtt_s)
    elif session.join.role is Role.PREFILL and session.join.probes:
        _probe(registry, session, now)


def _learn_sending(registry: Registry, session: NodeSession, now: float) -> None:
    paths = {p.node_id: path_report(report) for report, p in _peers(registry, session) if p.join.role is Role.DECODE}
    registry.link(session.join.cluster).reported(session.node_id, paths, now)


def _probe(registry: Registry, session: NodeSession, now: float) -> None:
    """One node of the cluster, the first that speaks, measures the way to one local node for all of them."""
    link = registry.link(session.join.cluster)
    nbytes = link.probe_due(now)
    if not nbytes:
        return
    for report, peer in _peers(registry, session):
        if peer.join.role is Role.DECODE and report.connections:
            session.send(ProbeLink(peer.node_id, nbytes))
            link.probed(nbytes, now)
            return


def _peers(registry: Registry, session: NodeSession) -> Iterator[tuple[LinkReport, NodeSession]]:
    for report in session.heartbeat.links if session.heartbeat is not None else ():
        peer = registry.node(report.peer_node)
        if peer is not None:
            yield report, peer


def path_report(report: LinkReport) -> PathReport:
    """What a link keeps of a node's report about a peer that it sends to."""
    return PathReport(
        rtt_s=report.rtt_s,
        least_rtt_s=report.least_rtt_s,
        acked_bytes=report.bytes_acked,
        resent_bytes=report.bytes_resent,
        probe_bytes=report.probe_bytes,
        at_least=report.at_least_bytes_per_s,
        at_most=report.at_most_bytes_per_s,
        stalled_s=report.stalled_s,
    )
