"""What a run comes to: latencies, rates, and whether it was sustained. The first fifth of a run is never counted.

TTFT is from a request's arrival at the gateway to its client's first token; whoever had none by the end counts as
infinite. SLO: TTFT <= 2 s + 3 x what the best prefill node needs for it idle, and TPOT within 5 % of its goal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.facts import PrefillCurve
from scheduler.lengths import FloatArray
from scheduler.simulator.run import Run

LEAST_REQUESTS, LEAST_STRATIFIED = 50_000, 20_000
COMPLETED_SHARE = 0.995
GROWTH, GROWTH_REQUESTS = 1.25, 10.0
MIX_ERROR = 0.01
TTFT_FLOOR_S, TTFT_FACTOR = 2.0, 3.0
TPOT_FACTOR = 1.05
SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Goals:
    """What an SLO is measured by: prefill as ``curve`` has it on an idle node, and ``tpot_s`` a token."""

    curve: PrefillCurve
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that came after the warm-up. Rates per second, times in seconds, shares from 0 to 1.

    ``steady`` says whether this one run bears what *sustained* asks of each; it takes several seeds to say sustained.
    ``egress_gbps`` is of what left the remote clusters meanwhile, whatever became of it. ``outstanding_slope`` is how
    many more requests are in the fleet, a second.
    """

    requests: int
    offered_req_s: float
    throughput_req_s: float
    steady: bool
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    tpot_p90_s: float
    slo_attainment: float
    egress_gbps: float
    offloaded_share: float
    conversions: int
    outstanding_slope: float
    outstanding_mean: float
    cached_share: float
    fell_back: int
    failed: int


def figures(run: Run, goals: Goals) -> Figures:
    """Work a run's records out."""
    traffic, records = run.traffic, run.records
    arrived = traffic.arrival_s
    begin, end = traffic.counted
    counted = arrived >= begin
    seconds = max(end - begin, 1e-9)
    first, done = np.asarray(records.first_at), np.asarray(records.done_at)
    answered = ~np.isnan(first)
    ttft = np.where(answered, first - arrived, inf)
    output = traffic.output_tokens
    finished = ~np.isnan(done)
    tpot = np.full(len(arrived), inf)
    several = finished & (output > 1)
    tpot[several] = (done - first)[several] / (output - 1)[several]
    tpot[finished & (output <= 1)] = 0.0
    in_window = finished & (done >= begin) & (done <= end)
    outstanding = _Outstanding(arrived, np.where(finished, done, inf))
    middle, last = (outstanding.mean(begin + seconds * part / 3, begin + seconds * (part + 1) / 3) for part in (1, 2))
    tokens = traffic.prompt_tokens - 1
    work = _seconds(goals.curve, tokens.astype(np.float64))
    cached = np.asarray(records.cached_tokens)
    steady = (
        in_window.sum() >= COMPLETED_SHARE * counted.sum()
        and last <= GROWTH * middle + GROWTH_REQUESTS
        and abs(work[in_window].mean() / work[counted].mean() - 1) <= MIX_ERROR
        if in_window.any()
        else False
    )
    good = (ttft <= TTFT_FLOOR_S + TTFT_FACTOR * work) & (tpot <= TPOT_FACTOR * goals.tpot_s)
    p50, p90, p99 = (float(np.quantile(ttft[counted], q, method="lower")) for q in (0.5, 0.9, 0.99))
    remote = np.frombuffer(bytes(records.remote), dtype=np.uint8).astype(bool)
    before, after = records.egress
    return Figures(
        requests=int(counted.sum()),
        offered_req_s=float(counted.sum()) / seconds,
        throughput_req_s=float(in_window.sum()) / seconds,
        steady=bool(steady),
        ttft_mean_s=float(ttft[counted].mean()),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        ttft_max_s=float(ttft[counted].max()),
        tpot_p90_s=float(np.quantile(tpot[counted], 0.9, method="lower")),
        slo_attainment=float(good[counted].mean()),
        egress_gbps=(after - before) * 8 / 1e9 / seconds,
        offloaded_share=float(remote[counted].mean()),
        conversions=sum(begin <= c.asked_at <= end for c in records.conversions),
        outstanding_slope=outstanding.slope(begin, end),
        outstanding_mean=outstanding.mean(begin, end),
        cached_share=float(cached[counted].sum() / tokens[counted].sum()) if tokens[counted].any() else 0.0,
        fell_back=records.fell_back,
        failed=records.failed,
    )


class _Outstanding:
    """How many requests have come and are not done, over time."""

    def __init__(self, arrived: FloatArray, done: FloatArray) -> None:
        self._arrived = arrived
        self._done_at_all = done
        self._done = np.sort(done)

    def mean(self, begin: float, end: float) -> float:
        """The time average between two moments."""
        stays = np.minimum(self._done_at_all, end) - np.maximum(self._arrived, begin)
        return float(np.maximum(stays, 0.0).sum()) / max(end - begin, 1e-9)

    def slope(self, begin: float, end: float) -> float:
        """The trend between two moments, a second."""
        at = np.linspace(begin, end, SAMPLES)
        there = np.searchsorted(self._arrived, at, "right") - np.searchsorted(self._done, at, "right")
        return float(np.polyfit(at, there, 1)[0]) if end > begin else 0.0


def _seconds(curve: PrefillCurve, tokens: FloatArray) -> FloatArray:
    seconds: FloatArray = curve.fixed_s + tokens * (curve.token_s + curve.square_s * tokens)
    return seconds
