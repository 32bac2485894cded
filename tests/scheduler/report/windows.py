"""A window of the case study's traffic as a gateway would have kept it, and the fleet that served it."""

from __future__ import annotations

import numpy as np

from scheduler.case_study import BYTES_PER_S_PER_GBPS, LENGTHS
from scheduler.controller.observation import Kind, LocalNode, Observation, Stage
from scheduler.controller.settings import ControllerSettings
from scheduler.facts import Prices
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200
from scheduler.report.conversions import Converted
from scheduler.report.egress import Site
from scheduler.report.report import ReportInputs
from scheduler.report.requests import Served, Shipment
from scheduler.throughput import PrefillCluster, PrefillNodes

SINCE = 1_790_000_000.0


def fleet(
    prefill: int = 3, total: int = 8, threshold: float = 19_400.0, link_gbps: float = 100.0, remote: int = 4
) -> Observation:
    nodes = tuple(
        LocalNode(f"n{i}", "h20", Stage.PREFILL if i < prefill else Stage.DECODE, busy=0.5) for i in range(total)
    )
    clusters = ()
    if remote:
        clusters = (PrefillCluster("east", (PrefillNodes(remote, H200),), link_gbps * BYTES_PER_S_PER_GBPS),)
    return Observation(nodes, (Kind("h20", H20, H20_DECODE),), clusters, CASE_STUDY_KV, threshold)


def served(
    count: int = 4000,
    rate: float = 2.5,
    threshold: float = 19_400.0,
    output: int = 1024,
    seed: int = 1,
    slow: float = 1.0,
) -> list[Served]:
    """Lengths one from each stratum of the case study's; a service time without waiting, ``slow`` times as long."""
    rng = np.random.default_rng(seed)
    shares = rng.permutation((np.arange(count) + 0.5) / count)
    at = SINCE + np.cumsum(rng.exponential(1 / rate, count))
    found = []
    for when, share in zip(at, shares, strict=True):
        tokens = round(LENGTHS.quantile(float(share)))
        away = tokens > threshold
        seconds = (H200 if away else H20).seconds(float(tokens)) * slow * float(rng.uniform(1.0, 1.6))
        nbytes = round(CASE_STUDY_KV.nbytes(float(tokens)))
        answer = max(2, round(float(rng.gamma(2.0, output / 2))))
        work = Shipment("east" if away else "local", seconds, nbytes)
        found.append(
            Served(
                at=float(when),
                prompt_tokens=tokens + 1 + tokens // 4,
                uncached_tokens=tokens,
                finished=True,
                remote=away,
                ttft_s=seconds,
                tpot_s=0.025,
                cached_tokens=tokens // 4,
                output_tokens=answer,
                shipments=(work,),
            )
        )
    return found


def inputs(
    requests: list[Served] | None = None, seen: Observation | None = None, settings: ControllerSettings | None = None
) -> ReportInputs:
    requests = served() if requests is None else requests
    middle = SINCE + 800.0
    return ReportInputs(
        requests=requests,
        since=SINCE,
        until=max([SINCE + 60.0, *(one.at for one in requests)]),
        settings=settings or ControllerSettings(),
        seen=seen or fleet(),
        sites=(
            Site("local", True, Prices(prefill_per_s=0.001)),
            Site("east", False, Prices(egress_per_gb=0.02, prefill_per_s=0.004), 12.5e9, 3.75e9),
        ),
        conversions=(Converted(1, "n3", "decode", "prefill", middle - 40, middle, "done", "controller", "more", 1.2),),
    )
