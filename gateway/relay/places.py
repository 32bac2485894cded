"""Which clusters' engines may see a prompt: by the same rule as for nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.clusters import Cluster, ClusterState
from gateway.fleet.engine import Engine
from gateway.keys import Principal
from gateway.registry import Registry
from scheduler.facts import ClusterFacts, LinkFacts, RequestFacts, SizeFacts
from scheduler.permits import may_hold

KEPT_S = 0.5
_NO_LINK = LinkFacts(None, None)
_NO_SIZES = SizeFacts()


@dataclass(frozen=True, slots=True)
class Where:
    """Clusters by name: those whose engines may be given a prompt, and of these the ones that take work now."""

    permitted: frozenset[str]
    working: frozenset[str]


class Places:
    """Asks the registry where clusters are and what their operators are trusted with, and keeps that a moment."""

    def __init__(self, registry: Registry) -> None:
        self.local = registry.local_cluster
        self._registry = registry
        self._kept: dict[tuple[int, str], tuple[Principal, Where]] = {}
        self._until = float("-inf")

    def permitted(self, principal: Principal, model: str, engines: Iterable[Engine], now: float) -> Where:
        """Of the clusters of a model's engines those that this caller's prompts may go to.

        A drained cluster takes no work. One that nobody registered is only a name that engines share.
        """
        if now >= self._until:
            self._kept.clear()
            self._until = now + KEPT_S
        found = self._kept.get((id(principal), model))
        if found is None:
            clusters = {engine.config.cluster for engine in engines}
            # the principal is kept too, so that no other one can have its id meanwhile
            found = self._kept[id(principal), model] = principal, self._permitted(principal, clusters)
        return found[1]

    def _permitted(self, principal: Principal, clusters: Iterable[str]) -> Where:
        limits = principal.limits
        request = RequestFacts(
            "",
            0,
            _NO_SIZES,
            allowed_clusters=principal.clusters,
            barred_clusters=limits.barred,
            regions=limits.regions,
            trusted_only=limits.trusted_only or limits.share_cache,
        )
        known = {cluster.name: cluster for cluster in self._registry.clusters}
        permitted = frozenset(name for name in clusters if may_hold(request, _facts(name, known.get(name))))
        drained = {name for name, cluster in known.items() if cluster.state is not ClusterState.ACTIVE}
        return Where(permitted, permitted - drained)


def _facts(name: str, known: Cluster | None) -> ClusterFacts:
    if known is None:
        return ClusterFacts(name, False, True, (), _NO_LINK)
    terms = known.terms
    return ClusterFacts(name, known.local, True, (), _NO_LINK, terms.region, terms.trusted, residency=terms.residency)
