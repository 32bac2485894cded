"""Facts of every kind, for tests that draw them: missing figures, dead links, forbidden places, prices, prefixes.

Hypothesis draws a seed and the seed makes the facts: with this many fields, values that it draws itself are mostly its
simplest ones, of which a remote way is hardly ever chosen, and a thousand times slower.
"""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from kvcache.quality import Quality
from scheduler.facts import (
    FREE,
    ClusterFacts,
    CodecFacts,
    DecodeNodeFacts,
    Facts,
    LinkFacts,
    PrefillCurve,
    PrefillNodeFacts,
    Prices,
    RequestFacts,
    RouteHint,
    SizeFacts,
)
from tests.scheduler.codecs import QUALITIES

CLUSTERS = ("local", "east", "west")
LAW = frozenset({"law"})
NONE: frozenset[str] = frozenset()


class _Dice:
    def __init__(self, seed: int) -> None:
        self.r = Random(seed)

    def mostly(self, usual: Any, *others: Any) -> Any:
        """The usual value four times in five: so that what is unusual is met alone, not all of it at once."""
        return usual if self.r.random() < 0.8 else self.r.choice(others)

    def one_of(self, *values: Any) -> Any:
        return self.r.choice(values)

    def codecs(self) -> tuple[CodecFacts, ...]:
        names = self.r.sample(sorted(QUALITIES), self.r.randrange(4))
        return tuple(
            CodecFacts(
                name,
                QUALITIES[name],
                self.mostly(self.r.uniform(0.1, 1.2), None),
                self.mostly(10.0 ** self.r.uniform(6, 10), None),
                self.mostly(10.0 ** self.r.uniform(6, 10), None),
            )
            for name in names
        )

    def curve(self) -> PrefillCurve | None:
        square = self.one_of(0.0, 1e-8)
        return self.mostly(PrefillCurve(self.r.random() / 4, 10.0 ** self.r.uniform(-5, -3), square), None)

    def cached(self) -> dict[str, int]:
        """A node cannot go on from where it does not hold all blocks."""
        held = self.mostly(0, *(64 * self.r.randrange(64) for _ in range(3)))
        return {"held_tokens": held, "cached_tokens": self.one_of(held, held // 128 * 64)}

    def prefill(self, node_id: str, rank: int | None) -> PrefillNodeFacts:
        return PrefillNodeFacts(
            node_id,
            self.r.randrange(10_000),
            self.mostly(2, 0),
            self.curve(),
            codecs=self.codecs(),
            egress_bytes_per_s=self.mostly(None, 10.0 ** self.r.uniform(4, 9)),
            encoders=self.one_of(1, 4),
            queued_s=self.one_of(None, 0.0, self.r.uniform(0, 3)),
            loras=self.one_of(LAW, NONE),
            dp_rank=rank,
            moves=self.mostly(True, False),
            dialable=self.mostly(True, False),
            **self.cached(),
        )

    def decode(self, node_id: str, rank: int | None) -> DecodeNodeFacts:
        return DecodeNodeFacts(
            node_id,
            self.r.randrange(5),
            self.mostly(2, 0),
            self.curve(),
            codecs=self.codecs(),
            loras=self.one_of(LAW, NONE),
            dp_rank=rank,
            **self.cached(),
        )

    def link(self) -> LinkFacts:
        return LinkFacts(
            self.mostly(10.0 ** self.r.uniform(4, 10), None, 0.0),
            self.one_of(None, self.r.uniform(0, 0.1)),
            self.mostly(0, self.r.randrange(10**8)),
            self.mostly(True, False),
            congested=self.mostly(False, True),
            utilisation=self.one_of(None, 0.1, 0.9),
        )

    def prices(self) -> Prices:
        by_hour = self.one_of((), (0.5,) * 12 + (2.0,) * 12)
        return self.one_of(FREE, Prices(self.r.uniform(0, 10), self.r.uniform(0, 10), by_hour))

    def cluster(self, name: str) -> ClusterFacts:
        ranks = self.mostly((None,), (0, 1))
        names = self.r.sample("abcd", self.mostly(2, 1, 0))
        nodes = tuple(self.prefill(f"{name}-{one}", rank) for one in names for rank in ranks)
        return ClusterFacts(
            name,
            name == CLUSTERS[0],
            self.mostly(bool(nodes), False),
            nodes,
            self.link(),
            self.one_of("eu", "us", ""),
            self.one_of(True, False),
            self.prices(),
            self.mostly(1.0, 0.5, 4.0),
            self.one_of(self.link(), None),
        )

    def facts(self, hinted: bool) -> Facts:
        clusters = tuple(self.cluster(name) for name in CLUSTERS)
        request = RequestFacts(
            "r",
            self.mostly(4000, 0, 1, 2, 65, 1000),
            SizeFacts(self.one_of(100, 10_000), ((511, self.one_of(0, 10_000)),), self.one_of(0, 10**6)),
            self.mostly(256, 0),
            self.r.choice(list(RouteHint)) if hinted else RouteHint.NONE,
            self.one_of(*CLUSTERS, "nowhere", None),
            self.mostly(None, NONE, frozenset({"east"})),
            self.r.choice(list(Quality)),
            self.mostly(NONE, frozenset({"west"}), frozenset({"local"})),
            self.mostly(None, frozenset({"eu"}), frozenset({"eu", "us"}), NONE),
            self.mostly(False, True),
            lora=self.mostly("", "law"),
            session_nodes=self.one_of(NONE, frozenset({"east-a", "west-b", "local-c", "v"})),
        )
        names = self.r.sample("vwxyz", self.mostly(2, 1, 0))
        decoders = tuple(self.decode(name, self.mostly(None, 1)) for name in names)
        return Facts(
            request,
            clusters,
            decoders,
            self.mostly(self.r.randrange(3000), 0, 3999, 3998),
            self.r.randrange(24),
            self.one_of(True, False),
        )


seeds = st.integers(0, 2**64 - 1)
any_facts = seeds.map(lambda seed: _Dice(seed).facts(hinted=True))
"""A local cluster and two remote ones, in any state."""


def facts_of(seed: int) -> Facts:
    """The facts of one seed, without a hint."""
    return _Dice(seed).facts(hinted=False)


unhinted_facts = seeds.map(facts_of)
