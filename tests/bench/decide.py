"""What one routing decision takes, in processor time: ``python -m tests.bench.decide``. Prints JSON.

``small`` is what the simulator runs: 2 clusters, 7 prefill and 5 decode nodes, a codec each. ``large`` is 10 clusters
and 200 nodes, of which 10 hold a prefix, with the trimming to candidates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from operator import attrgetter

from msgspec.structs import replace

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
    SizeFacts,
)
from scheduler.policy import RoutingPolicy

ROUNDS = 5
REPEATS = 4000
_queued, _running = attrgetter("queued_tokens"), attrgetter("running")
CODEC = CodecFacts("lossless", Quality.EXACT, 0.7, 1e9, 2e9)
SIZES = SizeFacts(17_280, (), 182_347_366)


def fleet(clusters: int, prefill: int, decode: int) -> Facts:
    """That many clusters, the first the local one, with ``prefill`` nodes each and ``decode`` nodes at home."""
    curve = PrefillCurve(0.4, 4e-5, 1e-10)
    found = []
    for at in range(clusters):
        nodes = tuple(
            PrefillNodeFacts(f"p{at}-{n}", 1000 * n, 8, curve, codecs=(CODEC,), queued_s=0.05 * n)
            for n in range(prefill)
        )
        link = LinkFacts(1e9 / (at + 1), 0.01 * at, 0, utilisation=0.2)
        found.append(ClusterFacts(f"c{at}", at == 0, True, nodes, link))
    decoders = tuple(DecodeNodeFacts(f"d{n}", n % 3, 8, curve, codecs=(CODEC,)) for n in range(decode))
    request = RequestFacts("r", 40_000, SIZES, chunk_tokens=256)
    return Facts(request, tuple(found), decoders, threshold_tokens=8000)


def small() -> Facts:
    """3 prefill nodes at home and 4 in another cluster."""
    facts = fleet(2, 4, 5)
    home, away = facts.clusters
    return replace(facts, clusters=(replace(home, nodes=home.nodes[:3]), away))


def trimmed(facts: Facts, held: dict[str, int]) -> Facts:
    """The same with candidates only, as the gateway hands them in."""
    clusters = tuple(
        ClusterFacts(c.name, c.local, c.reachable, tuple(candidates(c.nodes, _queued, held)), c.link)
        for c in facts.clusters
    )
    decoders = tuple(candidates(facts.decode_nodes, _running, held))
    return Facts(facts.request, clusters, decoders, facts.threshold_tokens)


def micros(work: Callable[[], object]) -> float:
    """Microseconds of processor time a call, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(REPEATS):
            work()
        best = min(best, time.process_time() - began)
    return best / REPEATS * 1e6


def main() -> None:
    """Measure and print."""
    policy, few, many = RoutingPolicy(), small(), fleet(10, 18, 20)
    held = {f"p{at}-{at}": 64 for at in range(10)}
    print(
        json.dumps(
            {
                "small_us": round(micros(lambda: policy.decide(few)), 2),
                "large_us": round(micros(lambda: policy.decide(trimmed(many, held))), 2),
                "large_trim_us": round(micros(lambda: trimmed(many, held)), 2),
                "large_untrimmed_us": round(micros(lambda: policy.decide(many)), 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
