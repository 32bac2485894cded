"""Moving a cached prefix to the cluster that prefills: when a link has room for it, and from where.

The two rules of PrfaaS: where bandwidth is scarce each cluster's cache counts on its own; where it is abundant the
longest prefix counts wherever it is, and is moved to where the rest is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from scheduler.facts import ClusterFacts, LinkFacts, PrefillNodeFacts
from scheduler.predict import link_rate


class Source(msgspec.Struct, frozen=True, gc=False):
    """A node that has a prefix, and the way that it would take from there."""

    cluster: ClusterFacts
    node: PrefillNodeFacts
    way: LinkFacts

    def arrives_s(self, nbytes: int) -> float:
        """Seconds until that much is read and has come over the way, behind what it carries already, uncompressed."""
        rate = link_rate(self.node, self.way)
        assert rate is not None, "an abundant link was measured"
        return self.node.reload_s + (self.way.queued_bytes + nbytes) / rate + (self.way.rtt_s or 0.0)


def abundant(link: LinkFacts, below: float) -> bool:
    """Whether a link is known to have room: measured of late, not congested, used less than the share ``below``."""
    if link.congested or not link.fresh or not link.bytes_per_s or link.bytes_per_s <= 0:
        return False
    return link.utilisation is not None and link.utilisation < below


def longest(ways: Sequence[tuple[ClusterFacts, LinkFacts]], to: PrefillNodeFacts | None, stop: int) -> Source | None:
    """The node of these clusters from which the longest prefix can be moved to ``to``; ties by name. None without any.

    What counts is ``cached_tokens``: computing goes on only where windows and states are there, too. One as long as all
    that is to be computed is of no use: a prefill computes at least one token.
    """
    if to is None or not to.moves:
        return None
    best, least = None, (0, "", "", 0)
    for cluster, way in ways:
        for node in cluster.nodes:
            if not (0 < node.cached_tokens < stop and node.moves and node.free_slots > 0):
                continue
            if not (node.dialable or to.dialable):
                continue
            key = (-node.cached_tokens, cluster.name, node.node_id, node.dp_rank or 0)
            if best is None or key < least:
                best, least = Source(cluster, node, way), key
    return best
