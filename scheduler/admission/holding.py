"""What must wait although a node has a slot free: long prompts where enough of them wait, so that short ones get in.

Prefill nodes run the job of the least rank first and change over between chunks, so a short prompt passes long ones
there; but every job that waits has a slot there and on its decode node.
"""

from __future__ import annotations

from scheduler.decision import Decision, Option, Reason
from scheduler.facts import ClusterFacts, PrefillNodeFacts, RouteHint
from scheduler.permits import may_hold
from scheduler.predict import compute_s, wait_s

HOLD_S = 30.0
"""Prefill that may lie on a node before long prompts wait elsewhere: still enough that a decision sees who is busy."""
SHORT_S = 1.0
"""What takes less is never held."""
_DISPLACED = (Reason.NO_REMOTE, Reason.BREAKER_OPEN, Reason.REMOTE_SLOWER, Reason.LINK_CONGESTED)


def waits_for_room(decision: Decision) -> bool:
    """Whether nothing but a free slot is wanting, so that waiting helps."""
    if decision.reason is Reason.OVERLOADED:
        return True
    if decision.reason is not Reason.HINTED_CLUSTER_UNAVAILABLE:
        return False
    request = decision.facts.request
    return any(
        _full(cluster)
        for cluster in decision.facts.clusters
        if not cluster.local and (request.hint is RouteHint.REMOTE or cluster.name == request.hint_cluster)
    )


def _full(cluster: ClusterFacts) -> bool:
    usable = [node for node in cluster.nodes if not node.suspended]
    return cluster.reachable and not cluster.suspended and bool(usable) and all(n.free_slots <= 0 for n in usable)


def held_back(decision: Decision) -> bool:
    """Whether its prefill node has enough to do, and the prompt is long. What was never measured is not held."""
    node = _node(decision)
    if decision.chosen is None or node is None:
        return False
    if displaced(decision):
        return busy(node) and _long(decision.chosen, node)
    waits = wait_s(node)
    return waits is not None and waits > HOLD_S and _long(decision.chosen, node)


def busy(node: PrefillNodeFacts) -> bool:
    """Whether it has no room for what comes last: that may lie there only where it is begun in a moment."""
    waits = wait_s(node)
    return waits is not None and waits + node.last_s > SHORT_S


def displaced(decision: Decision) -> bool:
    """Whether it is prefilled at home only for the state of the remote clusters: lost, suspended, congested or slow.

    The threshold says that it belongs elsewhere, and the home was not made for such work: it comes after all other,
    whose nodes it may fill with no more than they can do in a moment.
    """
    if decision.reason not in _DISPLACED:
        return False
    facts = decision.facts
    return any(may_hold(facts.request, cluster) for cluster in facts.clusters if not cluster.local)


def _long(chosen: Option, node: PrefillNodeFacts) -> bool:
    takes = compute_s(chosen.cached_tokens, chosen.cached_tokens + chosen.compute_increment, node.prefill)
    return takes is not None and takes > SHORT_S


def _node(decision: Decision) -> PrefillNodeFacts | None:
    chosen = decision.chosen
    if chosen is None or chosen.prefill_node is None:
        return None
    for cluster in decision.facts.clusters:
        if cluster.name == chosen.cluster:
            return next((node for node in cluster.nodes if node.node_id == chosen.prefill_node), None)
    return None
