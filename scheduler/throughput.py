"""The steady-state throughput model of PrfaaS-PD, equations 2 to 8 of arXiv 2604.15039. It has no queueing.

Symbols are the paper's: L the uncached input length, t the threshold, p = P(L > t), l_long = E[L | L > t], l_short =
E[L | L <= t]; Theta of a stage is the rate of *its* requests it can serve, Lambda_max the rate of all. An instance is
one model replica (the paper's N/P GPUs). Two readings of "T_prefill" differ because T is convex:

- ``POINT`` takes T at the mean length, as the published tables mostly do: T(E[L]);
- ``MEAN_SERVICE`` takes the mean of T, E[T(L)], which is what a queue has to serve: beyond N / E[T(L)] it grows without
  bound. This one is the true limit, and never above the other.

Several clusters add up: each takes the share of long prompts that it can serve. So do the kinds of nodes in a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isclose

import numpy as np

from scheduler.lengths import LengthDistribution, TokenFunction, mean_length
from scheduler.profiles import DecodeProfile, KvSize, PrefillProfile


class Reading(StrEnum):
    """Which service time a class of prompts is said to have."""

    POINT = "point"
    MEAN_SERVICE = "mean_service"


@dataclass(frozen=True, slots=True)
class PrefillNodes:
    """``count`` instances of one kind in a prefill cluster."""

    count: float
    prefill: PrefillProfile


@dataclass(frozen=True, slots=True)
class PrefillCluster:
    """A remote cluster and its way home: ``egress_bytes_per_s`` is B_out; inf where the link is no matter."""

    name: str
    nodes: tuple[PrefillNodes, ...]
    egress_bytes_per_s: float = inf


@dataclass(frozen=True, slots=True)
class LocalNodes:
    """``count`` local instances of one kind, each of which may prefill or decode."""

    count: int
    prefill: PrefillProfile
    decode: DecodeProfile


@dataclass(frozen=True, slots=True)
class Deployment:
    """What there is to plan with, and L_out, the mean ``output_tokens`` of a request."""

    local: tuple[LocalNodes, ...]
    clusters: tuple[PrefillCluster, ...]
    kv: KvSize
    output_tokens: float

    def __post_init__(self) -> None:
        if not self.local:
            raise ValueError("deployment: local holds no nodes, so nothing can decode")
        if self.output_tokens <= 0:
            raise ValueError(f"deployment: output_tokens must be positive, got {self.output_tokens}")


@dataclass(frozen=True, slots=True)
class ClusterRate:
    """Long prompts per second of one cluster: what ``kinds`` of its nodes compute and what its ``link`` lets out."""

    kinds: tuple[float, ...]
    link: float

    @property
    def compute(self) -> float:
        """What all nodes compute."""
        return sum(self.kinds)

    @property
    def theta(self) -> float:
        """Equation 3, of this cluster."""
        return min(self.compute, self.link)


@dataclass(frozen=True, slots=True)
class Demand:
    """The traffic as a threshold divides it, and what each side costs.

    ``remote`` are the clusters' rates of long prompts, ``short_s`` the service time of a short prompt on each kind of
    local node, ``kv_long_bytes`` what a long prompt sends. A class that is empty has length, bytes and times of 0.
    """

    t: float
    p: float
    l_long: float
    l_short: float
    kv_long_bytes: float
    remote: tuple[ClusterRate, ...]
    short_s: tuple[float, ...]

    @property
    def theta_prfaas(self) -> float:
        """Equation 3: Theta_prfaas, summed over clusters."""
        return sum(rate.theta for rate in self.remote)

    @property
    def link_bound(self) -> bool:
        """Whether a link, not the nodes behind it, limits some cluster."""
        return any(rate.link < rate.compute for rate in self.remote)

    @property
    def needed_egress_bytes_per_s(self) -> float:
        """Equation 2: the egress that keeps every prefill node of all clusters busy, N E[S_kv] / E[T_prefill]."""
        return sum(rate.compute for rate in self.remote) * self.kv_long_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """One operating point. ``prefill`` is how many local nodes of each kind prefill; the others decode."""

    demand: Demand
    prefill: tuple[float, ...]
    n_p: float
    n_d: float
    theta_pdp: float
    theta_pdd: float

    @property
    def prefill_limit(self) -> float:
        """min(Theta_prfaas / p, Theta_pdp / (1 - p)): the two sides that equation 7 makes equal."""
        p = self.demand.p
        return min(_limit(self.demand.theta_prfaas, p), _limit(self.theta_pdp, 1 - p))

    @property
    def lambda_max(self) -> float:
        """Equation 6: requests per second of the whole."""
        return min(self.prefill_limit, self.theta_pdd)

    @property
    def limited_by(self) -> str:
        """Which side is full first: prefill, decode or both."""
        if isclose(self.theta_pdd, self.prefill_limit, rel_tol=1e-6):
            return "both"
        return "decode" if self.theta_pdd < self.prefill_limit else "prefill"

    @property
    def egress_bytes_per_s(self) -> float:
        """What leaves the prefill clusters at Lambda_max."""
        return self.lambda_max * self.demand.p * self.demand.kv_long_bytes if self.demand.p else 0.0


def divide(deployment: Deployment, lengths: LengthDistribution, t: float, reading: Reading) -> Demand:
    """What threshold ``t`` makes of the traffic: prompts longer than ``t`` uncached tokens are offloaded."""
    p = lengths.above(t)
    long = _Class(lengths, t, inf, p, reading)
    short = _Class(lengths, 0.0, t, 1 - p, reading)
    kv_long = long.typical(deployment.kv.nbytes)
    return Demand(
        t=t,
        p=p,
        l_long=long.mean,
        l_short=short.mean,
        kv_long_bytes=kv_long,
        remote=tuple(
            ClusterRate(
                kinds=tuple(_rate(nodes.count, long.typical(nodes.prefill.seconds)) for nodes in cluster.nodes),
                link=_rate(cluster.egress_bytes_per_s, kv_long),
            )
            for cluster in deployment.clusters
        ),
        short_s=tuple(short.typical(nodes.prefill.seconds) for nodes in deployment.local),
    )


def rates(deployment: Deployment, demand: Demand, prefill: Sequence[float]) -> Rates:
    """The rates when ``prefill`` local nodes of each kind prefill and the others decode; parts of a node are allowed.

    Raises ValueError unless ``prefill`` has one count for each kind, from 0 to what there is.
    """
    if len(prefill) != len(deployment.local):
        raise ValueError(f"prefill has {len(prefill)} counts for {len(deployment.local)} kinds of local nodes")
    for count, nodes in zip(prefill, deployment.local, strict=True):
        if not 0 <= count <= nodes.count:
            raise ValueError(f"prefill must be between 0 and {nodes.count} nodes of {nodes.prefill.name}, got {count}")
    return Rates(
        demand=demand,
        prefill=tuple(prefill),
        n_p=sum(prefill),
        n_d=sum(nodes.count for nodes in deployment.local) - sum(prefill),
        # equation 4
        theta_pdp=sum(_rate(count, seconds) for count, seconds in zip(prefill, demand.short_s, strict=True)),
        # equation 5
        theta_pdd=sum(
            (nodes.count - count) * nodes.decode.tokens_per_s / deployment.output_tokens
            for count, nodes in zip(prefill, deployment.local, strict=True)
        ),
    )


class _Class:
    """The prompts of one side of the threshold."""

    def __init__(self, lengths: LengthDistribution, low: float, high: float, share: float, reading: Reading) -> None:
        self._lengths, self._low, self._high, self._share = lengths, low, high, share
        self._reading = reading
        self.mean = mean_length(lengths, low, high) if share > 0 else 0.0

    def typical(self, f: TokenFunction) -> float:
        """What ``f`` is for these prompts under the reading; 0 where there are none."""
        if self._share <= 0:
            return 0.0
        if self._reading is Reading.POINT:
            return float(f(np.array([self.mean]))[0])
        return self._lengths.expect(f, self._low, self._high) / self._share


def _rate(capacity: float, cost: float) -> float:
    """Capacity over cost; 0 for a class that is empty, whose share of the traffic is 0 as well."""
    return capacity / cost if cost > 0 else 0.0


def _limit(theta: float, share: float) -> float:
    """The total rate at which a stage that gets ``share`` of the requests is full; a stage that gets none never is."""
    return inf if share <= 0 else theta / share
