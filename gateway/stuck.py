"""Remote prefill nodes that take jobs and do none of them: found at their heartbeats, and given up as lost ones are.

A node at home is not judged: nothing else may be able to do what it was given, and its own node watches its engine.
"""

from __future__ import annotations

import logging

from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.control import Failed, Heartbeat
from kvcache.wire import Role

log = logging.getLogger(__name__)


def heard(registry: Registry, session: NodeSession, now: float) -> None:
    """Take what a node's last heartbeat shows of its work; where nothing moves, open its breaker and fail its jobs.

    What waits for room that others' KV has on its way out, or for a link on which nothing moves, is not its fault.
    """
    beat, cluster = session.heartbeat, session.join.cluster
    if beat is None or session.join.role is not Role.PREFILL or cluster == registry.local_cluster:
        return
    progress = session.progress
    progress.told(sum(max(0, link.bytes_acked - link.probe_bytes) for link in beat.links), now)
    if _waits_for_room(beat) or registry.link(cluster).dead(now):
        progress.moved(now)
    elif progress.stuck(now):
        _give_up(registry, session, now)


def _give_up(registry: Registry, session: NodeSession, now: float) -> None:
    detail = f"no sign of work for {session.progress.silent_s(now):.1f} s"
    log.warning("node stuck node=%s jobs=%d %s", session.node_id, len(session.prefilling), detail)
    session.progress.moved(now)  # what it did not do so far is judged
    registry.breakers.node(session).trip(now)
    for job in list(session.prefilling):
        owner = session.jobs.get(job)
        if owner is not None:
            owner.on_message(session, Failed(job, "prefill", "stuck", detail))


def _waits_for_room(beat: Heartbeat) -> bool:
    """Whether nothing is computed because what has been is still there."""
    return not beat.running and 0 < beat.queued_jobs < beat.open_transfers
