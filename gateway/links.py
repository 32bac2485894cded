"""What heartbeats tell of the links between clusters, and whom to ask for a probe of one that is idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.control import LinkReport, ProbeLink
from kvcache.wire import Role
from scheduler.links import LinkState, PathReport
from scheduler.probing import SLOWEST_BYTES_PER_S


def heard(registry: Registry, session: NodeSession, now: float) -> None:
    """Take what a node's last heartbeat says of its KV peers; ask it for a probe where one is due.

    A prefill node tells what it sends to the local nodes, a local node of its round trips to whoever sends, and of what
    it sends to remote ones.
    """
    local = session.join.cluster == registry.local_cluster
    if session.join.role is Role.PREFILL:
        _learn_sending(registry, session, local, now)
    if local:
        for report, peer in _peers(registry, session):
            registry.link(peer.join.cluster).observe_rtt(report.rtt_s)
        _learn_outward(registry, session, now)
    elif session.join.role is Role.PREFILL and session.join.probes:
        _probe(registry, session, registry.link(session.join.cluster), registry.local_cluster, now)


def _learn_sending(registry: Registry, session: NodeSession, local: bool, now: float) -> None:
    """What goes to the local decode nodes and, from a remote cluster, the prefixes that go to local prefill nodes."""
    paths = {
        peer.node_id: path_report(report)
        for report, peer in _peers(registry, session)
        if peer.join.role is Role.DECODE or (not local and peer.join.cluster == registry.local_cluster)
    }
    registry.link(session.join.cluster).reported(session.node_id, paths, now)


def _learn_outward(registry: Registry, session: NodeSession, now: float) -> None:
    """What a local node sends to each remote cluster that it is connected with; any of them may measure the way."""
    paths: dict[str, dict[str, PathReport]] = {}
    for report, peer in _peers(registry, session):
        cluster = peer.join.cluster
        if cluster != registry.local_cluster:
            told = path_report(report)
            if registry.outward(cluster).bytes_per_s is None:
                told = _first_of(told)
            paths.setdefault(cluster, {})[peer.node_id] = told
    for cluster, found in paths.items():
        registry.outward(cluster).reported(session.node_id, found, now)
        if session.join.probes:
            _probe(registry, session, registry.outward(cluster), cluster, now)


def _first_of(told: PathReport) -> PathReport:
    """Of a way that nothing but probes has taken, what it did at least is the first estimate: a probe of a quick way is
    over before it meets a limit, and nothing would be sent by a way that is never measured.
    """
    if told.at_most or told.at_least < SLOWEST_BYTES_PER_S:
        return told
    return replace(told, at_most=told.at_least)


def _probe(registry: Registry, session: NodeSession, link: LinkState, to: str, now: float) -> None:
    """One node, the first that speaks, measures the way to one node of the cluster ``to`` for all of them."""
    nbytes = link.probe_due(now)
    if not nbytes:
        return
    for report, peer in _peers(registry, session):
        if peer.join.cluster == to and report.connections:
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
