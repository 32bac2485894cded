"""A fleet at one split and one threshold: what the throughput model says of it, in both readings."""

from __future__ import annotations

from math import inf

import msgspec

from scheduler.controller.capacity import Capacities, Split
from scheduler.controller.observation import Observation, Stage
from scheduler.observed_lengths import ObservedLengths
from scheduler.throughput import Deployment, LocalNodes, Rates, Reading, divide, rates

BITS_PER_GBIT = 1e9


class Point(msgspec.Struct, frozen=True):
    """A split, ``prefill`` nodes of each kind and the rest in decode, with a threshold in uncached tokens.

    ``lambda_max`` in the ``mean_service`` reading, the true limit of stability, and ``lambda_point`` in the ``point``
    reading, as published figures mostly are. ``egress_gbps`` leaves the clusters at the offered rate.
    """

    prefill: Split
    decode: Split
    threshold: float
    lambda_max: float
    lambda_point: float
    limited_by: str
    offloaded: float
    egress_gbps: float


class FleetModel:
    """A fleet with one distribution of uncached lengths, and ``output_tokens`` a request. Rates are per second.

    ``split`` is the present one: prefill nodes of each kind, a node that is being converted as what it becomes.
    """

    def __init__(self, seen: Observation, lengths: ObservedLengths, output_tokens: float) -> None:
        self.seen = seen
        self.lengths = lengths
        self.output_tokens = output_tokens
        self.counts = tuple(sum(node.kind == kind.name for node in seen.nodes) for kind in seen.kinds)
        self.split = tuple(
            sum(node.kind == kind.name and node.goal is Stage.PREFILL for node in seen.nodes) for kind in seen.kinds
        )
        self.fleet = Capacities(seen.kinds, self.counts, seen.clusters, seen.kv, lengths)

    def deployment(self, output_tokens: float) -> Deployment:
        """The same fleet for answers of another length."""
        local = tuple(
            LocalNodes(count, kind.prefill, kind.decode)
            for count, kind in zip(self.counts, self.seen.kinds, strict=True)
        )
        return Deployment(local, self.seen.clusters, self.seen.kv, output_tokens)

    def effective(self, threshold: float, split: Split) -> float:
        """What a threshold comes to where one of the sides is not there."""
        if not self.seen.clusters:
            return inf
        return threshold if sum(split) else 0.0

    def rates(self, split: Split, threshold: float, reading: Reading = Reading.MEAN_SERVICE) -> Rates:
        """Every stage's rates at one point."""
        deployment = self.deployment(self.output_tokens)
        return rates(deployment, divide(deployment, self.lengths, threshold, reading), split)

    def point(self, split: Split, threshold: float, rate: float) -> Point:
        """One point, with its egress at the offered ``rate``."""
        found = self.rates(split, threshold)
        return Point(
            prefill=split,
            decode=tuple(count - n for count, n in zip(self.counts, split, strict=True)),
            threshold=threshold,
            lambda_max=found.lambda_max,
            lambda_point=self.rates(split, threshold, Reading.POINT).lambda_max,
            limited_by=found.limited_by,
            offloaded=found.demand.p,
            egress_gbps=rate * found.demand.p * found.demand.kv_long_bytes * 8 / BITS_PER_GBIT,
        )


def full_at(theta: float, share: float) -> float:
    """The rate of all requests at which a stage that gets ``share`` of them is full; inf where it gets none."""
    return theta / share if share > 0 else inf
