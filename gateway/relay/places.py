"""Which clusters' engines may see a prompt: by the same rule as for nodes."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.keys import Principal
from gateway.registry import Cluster, ClusterState, Registry
from scheduler.facts import ClusterFacts, LinkFacts, RequestFacts, SizeFacts
from scheduler.permits import may_hold

_NO_LINK = LinkFacts(None, None)
_NO_SIZES = SizeFacts()


class Places:
    """Asks the registry where clusters are and what their operators are trusted with."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.local = registry.local_cluster

    def permitted(self, principal: Principal, clusters: Iterable[str]) -> frozenset[str]:
        """Of these clusters, those whose engines may be given this caller's prompts."""
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
        return frozenset(name for name in clusters if may_hold(request, _facts(name, known.get(name))))

    def takes_work(self, cluster: str) -> bool:
        """Whether a cluster is not drained. One that nobody registered is only a name that engines share."""
        return all(known.state is ClusterState.ACTIVE for known in self._registry.clusters if known.name == cluster)


def _facts(name: str, known: Cluster | None) -> ClusterFacts:
    if known is None:
        return ClusterFacts(name, False, True, (), _NO_LINK)
    return ClusterFacts(name, known.local, True, (), _NO_LINK, known.terms.region, known.terms.trusted)
