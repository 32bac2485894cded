"""Clusters and nodes as a gateway knows them, and the facts of one request among them.

Facts are built for the candidates only, from what the index answered, as the gateway does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from kvcache.presets import dense_70b
from kvcache.quality import Quality
from scheduler.candidates import candidates
from scheduler.facts import (
    ClusterFacts,
    CodecFacts,
    DecodeNodeFacts,
    Facts,
    LinkFacts,
    PrefillCurve,
    PrefillNodeFacts,
    RequestFacts,
)
from scheduler.prefix_index import Match
from scheduler.sizes import size_facts

THRESHOLD_TOKENS = 8192
CHUNK_TOKENS = 2048
SLOTS = 8
NOTHING = Match(0, 0)

_CODECS = (
    CodecFacts("raw", Quality.EXACT, 1.0, 20e9, 20e9),
    CodecFacts("lossless", Quality.EXACT, 0.7, 2e9, 3e9),
    CodecFacts("fp8", Quality.NEAR, 0.5, 5e9, 5e9),
    CodecFacts("int8", Quality.NEAR, 0.5, 3e9, 4e9),
)
_SIZES = size_facts(dense_70b())
_QUEUED, _RUNNING = attrgetter("queued_tokens"), attrgetter("running")


@dataclass(slots=True)
class Worker:
    """A node's session at the gateway."""

    node_id: str
    free_slots: int = SLOTS
    queued_tokens: int = 0
    running: int = 0
    prefill: PrefillCurve = field(default_factory=lambda: PrefillCurve(0.01, 2e-5, 1e-10))


class Fleet:
    """``nodes`` in ``clusters`` of like size; of the local one half decode."""

    def __init__(self, nodes: int, clusters: int) -> None:
        """Raises ValueError where a cluster would be empty, or the local one could not prefill and decode."""
        if nodes < 2 * clusters:
            raise ValueError(f"nodes: {clusters} clusters need at least {2 * clusters} nodes, not {nodes}")
        members = [[Worker(f"node-{n}") for n in range(c, nodes, clusters)] for c in range(clusters)]
        half = len(members[0]) // 2
        self.decoders = members[0][:half]
        self.clusters = [members[0][half:], *members[1:]]
        self.node_ids = [worker.node_id for member in members for worker in member]
        self._links = [LinkFacts(None if c == 0 else 1.25e9, 0.0002 if c == 0 else 0.02) for c in range(clusters)]

    def shuffle(self, rng: np.random.Generator) -> None:
        """Other loads everywhere."""
        for worker in (*self.decoders, *(worker for members in self.clusters for worker in members)):
            worker.queued_tokens = int(rng.integers(0, 200_000))
            worker.free_slots = int(rng.integers(0, SLOTS + 1))
            worker.running = SLOTS - worker.free_slots

    def facts(self, request_id: str, prompt_tokens: int, block_tokens: int, found: Mapping[str, Match]) -> Facts:
        """All that one decision sees."""
        held = {node: match.held_blocks for node, match in found.items()}
        clusters = []
        for number, members in enumerate(self.clusters):
            nodes = []
            for worker in candidates(members, _QUEUED, held):
                match = found.get(worker.node_id, NOTHING)
                nodes.append(
                    PrefillNodeFacts(
                        worker.node_id,
                        worker.queued_tokens,
                        worker.free_slots,
                        worker.prefill,
                        match.resumable_blocks * block_tokens,
                        match.held_blocks * block_tokens,
                        _CODECS,
                    )
                )
            clusters.append(ClusterFacts(f"cluster-{number}", number == 0, True, tuple(nodes), self._links[number]))
        decoders = []
        for worker in candidates(self.decoders, _RUNNING, held):
            match = found.get(worker.node_id, NOTHING)
            cached, kept = match.resumable_blocks * block_tokens, match.held_blocks * block_tokens
            decoders.append(
                DecodeNodeFacts(
                    worker.node_id, worker.running, worker.free_slots, worker.prefill, cached, kept, _CODECS
                )
            )
        request = RequestFacts(request_id, prompt_tokens, _SIZES, CHUNK_TOKENS)
        return Facts(request, tuple(clusters), tuple(decoders), THRESHOLD_TOKENS)
