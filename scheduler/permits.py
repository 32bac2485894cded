"""Where a prompt may go at all. No hint, price or speed is looked at here, and none changes the answer."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.facts import ClusterFacts, RequestFacts


def may_hold(request: RequestFacts, cluster: ClusterFacts) -> bool:
    """Whether the prompt, or KV made from it, may be in this cluster.

    At home only residency is asked: its key's list of clusters and its operator's trust are about remote ones. A
    cluster whose region is not known lies in none that a request names.
    """
    if request.regions is not None and request.regions.isdisjoint((cluster.region, *cluster.residency)):
        return False
    if cluster.name in request.barred_clusters:
        return False
    if cluster.local:
        return True
    if request.trusted_only and not cluster.trusted:
        return False
    return request.allowed_clusters is None or cluster.name in request.allowed_clusters


def decodes_here(request: RequestFacts, clusters: Sequence[ClusterFacts]) -> bool:
    """Whether the prompt may be where all answers are spoken; where that is not known, only if it may be anywhere."""
    for cluster in clusters:
        if cluster.local:
            return may_hold(request, cluster)
    return request.regions is None


def carries(cluster: ClusterFacts) -> bool:
    """Whether a remote cluster can be used now: it is reachable, and its link carries anything at all."""
    return cluster.reachable and not (cluster.link.bytes_per_s is not None and cluster.link.bytes_per_s <= 0)
