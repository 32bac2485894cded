"""How long a prompt's prefill takes at an operating point when nothing waits: what the paper's table calls TTFT.

A remote prefill streams its KV while it computes, so the slower of the two counts. There is no queue, no round trip and
no decode step in these times: they say nothing about behaviour under load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.lengths import FloatArray, LengthDistribution
from scheduler.profiles import KvSize, PrefillProfile
from scheduler.throughput import Deployment, Rates

_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class _Way:
    """A ``share`` of the prompts with ``low`` < L <= ``high`` takes ``seconds(L)``, which grows with L."""

    share: float
    low: float
    high: float
    seconds: Callable[[FloatArray], FloatArray]

    def within(self, lengths: LengthDistribution, limit_s: float) -> float:
        """The probability that a prompt comes this way and takes at most ``limit_s``."""
        longest = _last(lambda tokens: self.one(tokens) <= limit_s, self.low, min(self.high, _top(lengths)))
        return self.share * (lengths.above(self.low) - lengths.above(longest)) if longest > self.low else 0.0

    def one(self, tokens: float) -> float:
        """The seconds of a single prompt."""
        return float(self.seconds(np.array([tokens]))[0])


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Seconds of prefill without queueing."""

    mean_s: float
    p90_s: float


def service_times(deployment: Deployment, lengths: LengthDistribution, point: Rates) -> ServiceTimes:
    """Mean and 90th percentile over all prompts at an operating point.

    Raises ValueError where the point serves a class of prompts on nothing.
    """
    ways = _ways(deployment, point)
    mean_s = sum(way.share * lengths.expect(way.seconds, way.low, way.high) for way in ways)

    def below(limit_s: float) -> bool:
        return sum(way.within(lengths, limit_s) for way in ways) < 0.9

    top_s = max(way.one(min(way.high, _top(lengths))) for way in ways)
    return ServiceTimes(mean_s, _last(below, 0.0, top_s))


def _ways(deployment: Deployment, point: Rates) -> list[_Way]:
    """Every pair of prompt class and kind of node, a class divided by what each kind serves of it."""
    demand, ways = point.demand, []
    if demand.p > 0:
        if demand.theta_prfaas <= 0:
            raise ValueError(f"threshold {demand.t} offloads prompts, but no prefill cluster serves any")
        for cluster, rate in zip(deployment.clusters, demand.remote, strict=True):
            for nodes, kind in zip(cluster.nodes, rate.kinds, strict=True):
                share = rate.theta / demand.theta_prfaas * kind / rate.compute if rate.compute else 0.0
                seconds = _streamed(nodes.prefill, deployment.kv, cluster.egress_bytes_per_s)
                ways.append(_Way(share, demand.t, inf, seconds))
    if demand.p < 1:
        if point.theta_pdp <= 0:
            raise ValueError(f"threshold {demand.t} keeps prompts, but no local node prefills")
        for count, nodes_s, local in zip(point.prefill, demand.short_s, deployment.local, strict=True):
            ways.append(_Way(count / nodes_s / point.theta_pdp, 0.0, demand.t, local.prefill.seconds))
    return [way for way in ways if way.share > 0]


def _streamed(prefill: PrefillProfile, kv: KvSize, bytes_per_s: float) -> Callable[[FloatArray], FloatArray]:
    return lambda tokens: np.maximum(prefill.seconds(tokens), kv.nbytes(tokens) / bytes_per_s)


def _top(lengths: LengthDistribution) -> float:
    """The longest prompt there is: the threshold above which nothing lies."""
    return float(lengths.thresholds()[-1])


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest value in [low, high] for which ``holds``, which is true up to it; ``low`` where it never is."""
    if holds(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
