"""The case study of the PrfaaS paper (arXiv 2604.15039): its setting, its published figures, and ours beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.lengths import TruncatedLogNormal
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200
from scheduler.service_times import service_times
from scheduler.split_search import SplitSearch
from scheduler.throughput import Deployment, LocalNodes, PrefillCluster, PrefillNodes, Rates, Reading

SOURCE = "arXiv 2604.15039, tables of its case study"
LINK_GBPS = 100.0
PUBLISHED_T = 19_400.0
OUTPUT_TOKENS = 1024
REMOTE_INSTANCES, LOCAL_INSTANCES, HOMOGENEOUS_INSTANCES = 4, 8, 12

LENGTHS = TruncatedLogNormal(mu=9.90, sigma=1.00, low=128, high=131_072)
"""Published: mu 9.90, sigma 1.00, truncated to [128, 128K]."""

BYTES_PER_S_PER_GBPS = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Figures:
    """What the study's table says of one deployment; None where it has no such stage or the paper prints nothing.

    Lengths in tokens, rates in requests per second, ``n_prfaas`` and the like in instances.
    """

    t: float | None = None
    n_prfaas: float | None = None
    n_p: float | None = None
    n_d: float | None = None
    p: float | None = None
    theta_prfaas: float | None = None
    theta_pdp: float | None = None
    theta_pdd: float | None = None
    lambda_max: float | None = None
    egress_gbps: float | None = None
    ratio_to_homogeneous: float | None = None
    ttft_mean_s: float | None = None
    ttft_p90_s: float | None = None


PUBLISHED: Mapping[str, Figures] = {
    "prfaas_pd": Figures(
        t=PUBLISHED_T,
        n_prfaas=4,
        n_p=3,
        n_d=5,
        p=0.496,
        theta_prfaas=1.61,
        theta_pdp=1.64,
        theta_pdd=3.91,
        lambda_max=3.24,
        egress_gbps=13,
        ratio_to_homogeneous=1.54,
        ttft_mean_s=2.22,
        ttft_p90_s=3.51,
    ),
    "homogeneous": Figures(
        n_p=9,
        n_d=3,
        theta_pdp=2.11,
        theta_pdd=2.35,
        lambda_max=2.11,
        ratio_to_homogeneous=1.00,
        ttft_mean_s=4.44,
        ttft_p90_s=9.73,
    ),
    "naive": Figures(
        n_prfaas=4,
        n_d=8,
        theta_prfaas=2.45,
        theta_pdd=6.25,
        lambda_max=2.45,
        ratio_to_homogeneous=1.16,
        ttft_mean_s=1.74,
        ttft_p90_s=3.51,
    ),
}
"""The figures as printed, at 100 Gbps; the paper mixes both readings in them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One deployment under one reading."""

    figures: Figures
    rates: Rates


@dataclass(frozen=True, slots=True)
class Study:
    """One reading: the named deployments, and every whole split of the local nodes at its own best threshold."""

    outcomes: Mapping[str, Outcome]
    splits: tuple[Rates, ...]


def hybrid(link_gbps: float) -> Deployment:
    """4 x 8 H200 that prefill remotely over a link, 8 x 8 H20 at home."""
    cluster = PrefillCluster(
        "remote", (PrefillNodes(REMOTE_INSTANCES, H200),), egress_bytes_per_s=link_gbps * BYTES_PER_S_PER_GBPS
    )
    return Deployment((LocalNodes(LOCAL_INSTANCES, H20, H20_DECODE),), (cluster,), CASE_STUDY_KV, OUTPUT_TOKENS)


def homogeneous() -> Deployment:
    """The baseline of equal cost: 12 x 8 H20 at home and nothing remote."""
    return Deployment((LocalNodes(HOMOGENEOUS_INSTANCES, H20, H20_DECODE),), (), CASE_STUDY_KV, OUTPUT_TOKENS)


def case_study(link_gbps: float = LINK_GBPS) -> dict[Reading, Study]:
    """Every figure of the study in both readings, over a link of ``link_gbps``."""
    return {reading: _study(link_gbps, reading) for reading in Reading}


def _study(link_gbps: float, reading: Reading) -> Study:
    site, baseline = hybrid(link_gbps), homogeneous()
    search, alone = SplitSearch(site, LENGTHS, reading), SplitSearch(baseline, LENGTHS, reading)
    unit = alone.split()
    splits = search.splits()
    found = {
        "prfaas_pd": (site, search.split()),
        "homogeneous": (baseline, unit),
        "naive": (site, search.at(0.0, (0,))),
        "fractional_bound": (site, search.fractional()),
        "homogeneous_fractional": (baseline, alone.fractional()),
        "prfaas_pd_as_published": (site, search.at(PUBLISHED_T, (3,))),
    }
    outcomes = {
        name: _outcome(deployment, rates, rates.lambda_max / unit.lambda_max)
        for name, (deployment, rates) in found.items()
    }
    return Study(outcomes, splits)


def _outcome(deployment: Deployment, rates: Rates, ratio: float) -> Outcome:
    demand = rates.demand
    times = service_times(deployment, LENGTHS, rates)
    remote = sum(nodes.count for cluster in deployment.clusters for nodes in cluster.nodes)
    offloads, keeps = demand.p > 0, demand.p < 1
    figures = Figures(
        t=demand.t if offloads else None,
        n_prfaas=remote,
        n_p=rates.n_p,
        n_d=rates.n_d,
        p=demand.p,
        theta_prfaas=demand.theta_prfaas if offloads else None,
        theta_pdp=rates.theta_pdp if keeps else None,
        theta_pdd=rates.theta_pdd,
        lambda_max=rates.lambda_max,
        egress_gbps=rates.egress_bytes_per_s / BYTES_PER_S_PER_GBPS,
        ratio_to_homogeneous=ratio,
        ttft_mean_s=times.mean_s,
        ttft_p90_s=times.p90_s,
    )
    return Outcome(figures, rates)
