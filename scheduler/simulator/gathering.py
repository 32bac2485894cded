"""Facts about the simulated fleet, as the gateway's registry gives them about the real one.

What has not changed is not built again: an idle node, a decode node and a link answer with what they answered before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scheduler.facts import ClusterFacts, DecodeNodeFacts, Facts, LinkFacts, PrefillNodeFacts, RequestFacts
from scheduler.links import LinkState
from scheduler.simulator.decode import DecodeNode
from scheduler.simulator.fleet import LOCAL, Fleet, Settings
from scheduler.simulator.jobs import Job
from scheduler.simulator.machine import Machine
from scheduler.simulator.prefill import PrefillNode
from scheduler.simulator.prefixes import PrefixStore


class Site:
    """A remote cluster as the gateway sees it: its nodes, and what was learnt of its link."""

    def __init__(self, name: str, nodes: Sequence[PrefillNode], link: LinkState) -> None:
        self.name = name
        self.nodes = nodes
        self.link = link


class Gathering:
    """Looks at machines, sites and stores; owns none of them."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        machines: Sequence[Machine],
        sites: Sequence[Site],
        stores: dict[str, PrefixStore],
    ) -> None:
        self.threshold_tokens = settings.threshold_tokens
        self._sizes = fleet.sizes
        self._chunk_tokens = fleet.chunk_tokens
        self._mixes = settings.chunk_s > 0
        self._machines = machines
        self._sites = sites
        self._stores = stores
        self._home_link = LinkFacts(fleet.local_link.bytes_per_s, fleet.local_link.rtt_s)
        self._prefilling: list[PrefillNode] = []
        self._decoding: list[DecodeNode] = []
        self.roles_changed()

    def roles_changed(self) -> None:
        """Some machine takes other work than before."""
        self._prefilling = [m.prefill for m in self._machines if m.prefill.accepting]
        self._decoding = [m.decode for m in self._machines if m.decode.accepting]

    def facts(self, job: Job, now: float, without: Collection[str] = ()) -> Facts:
        """All that a decision about ``job`` may know; nodes named in ``without`` are left out."""
        request = RequestFacts(str(job.index), job.stop + 1, self._sizes, self._chunk_tokens)
        if job.blocks:
            return self._with_prefixes(request, job, now, without)
        home = [node.facts(0, 0, now) for node in self._prefilling if node.name not in without]
        decoders = [node.facts(0, 0) for node in self._decoding if node.name not in without]
        if self._mixes:
            home += [node.mixing_facts(0, 0, now) for node in self._decoding if node.name not in without]
        clusters = [ClusterFacts(LOCAL, True, bool(home), tuple(home), self._home_link)]
        for site in self._sites:
            site.link.wanted(now)
            nodes = tuple([n.facts(0, 0, now) for n in site.nodes if n.accepting and n.name not in without])
            clusters.append(ClusterFacts(site.name, False, bool(nodes), nodes, site.link.facts(now)))
        return Facts(request, tuple(clusters), tuple(decoders), self.threshold_tokens)

    def _with_prefixes(self, request: RequestFacts, job: Job, now: float, without: Collection[str]) -> Facts:
        found: dict[int, tuple[int, int]] = {}

        def match(name: str) -> tuple[int, int]:
            store = self._stores[name]
            if id(store) not in found:  # one that nodes share answers once
                found[id(store)] = store.match(job.blocks, job.stop)
            return found[id(store)]

        def prefill(nodes: Sequence[PrefillNode]) -> list[PrefillNodeFacts]:
            usable = [node for node in nodes if node.accepting and node.name not in without]
            return [node.facts(*match(node.name), now) for node in usable]

        decoding = [node for node in self._decoding if node.name not in without]
        decoders: list[DecodeNodeFacts] = [node.facts(*match(node.name)) for node in decoding]
        home = prefill(self._prefilling)
        if self._mixes:
            home += [node.mixing_facts(*match(node.name), now) for node in decoding]
        clusters = [ClusterFacts(LOCAL, True, bool(home), tuple(home), self._home_link)]
        for site in self._sites:
            site.link.wanted(now)
            nodes = tuple(prefill(site.nodes))
            clusters.append(ClusterFacts(site.name, False, bool(nodes), nodes, site.link.facts(now)))
        return Facts(request, tuple(clusters), tuple(decoders), self.threshold_tokens)
