"""What the fleet can do for the observed traffic: each stage's limit, the best split, and how sure that is.

Equations 3 to 6 of the throughput model and the controller's own search for the best split. Two operating points are
compared, the present one and the proposed one, each as it is: a split with its threshold. The interval comes from
drawing the observed requests again, so it says what the traffic seen leaves open, not what the model leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from scheduler.controller.assessment import ratio
from scheduler.controller.observation import Observation, Stage
from scheduler.controller.settings import ControllerSettings
from scheduler.controller.traffic import LEAST_ENDS, binned
from scheduler.lengths import FloatArray
from scheduler.observed_lengths import ObservedLengths
from scheduler.operating_point import FleetModel, Point, full_at
from scheduler.report.requests import Served
from scheduler.throughput import Reading, divide, rates

SAMPLES = 200
LOW, HIGH = 0.05, 0.95
THRESHOLDS, SPLITS = 48, 33
"""Columns and rows of the surface at most."""


class StageBalance(msgspec.Struct, frozen=True):
    """One stage: ``share`` of all requests go through it, and at ``full_at`` requests per second of *all* it is full.

    ``nodes`` count a node that is being converted as what it becomes. ``load`` is the offered rate over ``full_at``.
    ``busy`` and ``waiting`` were last heard of the nodes, and are None of remote ones. ``full_then`` is ``full_at`` of
    the proposed point; infinite where no request needs the stage.
    """

    name: str
    nodes: float
    share: float
    theta: float
    full_at: float
    load: float
    full_then: float
    busy: float | None = None
    waiting: int | None = None


class Advice(StrEnum):
    """What the figures say. ``UNSURE``: a better point is likely, but the traffic seen does not show it."""

    KEEP = "keep"
    RETUNE = "retune"
    REBALANCE = "rebalance"
    UNSURE = "unsure"


class Surface(msgspec.Struct, frozen=True):
    """Lambda_max in requests per second: a row for each number of local prefill nodes, a column for each threshold.

    ``peaks`` has each row's best threshold, which may lie between two columns, and Lambda_max there.
    """

    thresholds: tuple[float, ...]
    prefill: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    peaks: tuple[tuple[float, float], ...]


class CapacityView(msgspec.Struct, frozen=True):
    """``now`` is in force, ``tuned`` the same split at its best threshold, ``best`` what is proposed.

    ``gain`` is Lambda_max of ``best`` over ``now``; it lies between ``gain_low`` and ``gain_high`` in nine of ten draws
    of the observed requests, and above 1 in a share ``better`` of them. ``rate`` is the offered one.
    """

    kinds: tuple[str, ...]
    rate: float
    requests: int
    answers: int
    output_tokens: float
    now: Point
    tuned: Point
    best: Point
    gain: float
    gain_low: float
    gain_high: float
    better: float
    advice: Advice
    why: str
    stages: tuple[StageBalance, ...]
    bottleneck: str
    surface: Surface


def capacity_view(
    seen: Observation, requests: Sequence[Served], rate: float, settings: ControllerSettings, seed: int
) -> CapacityView | str:
    """The fleet against the window's requests, or a sentence that says what is missing. ``seed`` is for the draws."""
    lengths = np.asarray([one.uncached_tokens for one in requests if one.uncached_tokens > 0], dtype=np.float64)
    answers = np.asarray([one.output_tokens for one in requests if one.output_tokens], dtype=np.float64)
    missing = _missing(seen, len(lengths), len(answers), settings.least_requests)
    if missing:
        return missing
    prompted = rate * len(lengths) / len(requests)
    model = FleetModel(seen, binned(lengths), float(answers.mean()) * len(requests) / len(lengths))
    split = model.split
    at = model.effective(seen.threshold, split)
    now = model.point(split, at, prompted)
    tuned = model.point(split, model.fleet.prefill(split)[1], prompted)
    winner = model.fleet.best(model.output_tokens, split)
    best = model.point(winner, model.fleet.prefill(winner)[1], prompted)
    gains = _gains(model, lengths, answers, len(requests) / len(lengths), now, best, seed)
    gain, better = ratio(best.lambda_max, now.lambda_max), float(np.mean(gains > 1))
    low, high = (float(np.quantile(gains, q, method="inverted_cdf")) for q in (LOW, HIGH))
    advice, why = _advice(now, best, gain, low, prompted, settings)
    stages = _stages(seen, model, now, best, prompted)
    return CapacityView(
        kinds=tuple(kind.name for kind in seen.kinds),
        rate=prompted,
        requests=len(lengths),
        answers=len(answers),
        output_tokens=model.output_tokens,
        now=now,
        tuned=tuned,
        best=best,
        gain=gain,
        gain_low=low,
        gain_high=high,
        better=better,
        advice=advice,
        why=why,
        stages=stages,
        bottleneck=min(stages, key=lambda stage: stage.full_at).name,
        surface=_surface(model),
    )


def _missing(seen: Observation, lengths: int, answers: int, least: int) -> str:
    if not seen.nodes:
        return "No local node has told what it can do yet, so no capacity can be worked out."
    if lengths < least:
        return f"{lengths} requests had something to prefill; below {least} a split cannot be judged."
    if answers < LEAST_ENDS:
        return f"{answers} answers have ended; below {LEAST_ENDS} their mean length is not known."
    if not seen.clusters and not any(node.goal is Stage.PREFILL for node in seen.nodes):
        return "No node prefills: decode nodes do it in place, which the throughput model does not describe."
    return ""


def _gains(
    model: FleetModel,
    lengths: FloatArray,
    answers: FloatArray,
    per_request: float,
    now: Point,
    best: Point,
    seed: int,
) -> FloatArray:
    """Lambda_max of ``best`` over ``now`` for draws, with replacement, of the lengths and answers seen."""
    rng = np.random.default_rng(seed)
    whole = model.lengths
    bins = np.minimum(np.searchsorted(whole.edges, lengths), len(whole.edges) - 1)
    shares = np.bincount(bins, minlength=len(whole.edges)) / len(lengths)
    gains = np.empty(SAMPLES)
    for i in range(SAMPLES):
        drawn = rng.multinomial(len(lengths), shares)
        there = drawn > 0
        some = ObservedLengths(whole.means[there], drawn[there] / len(lengths), whole.edges[there])
        output = float(rng.choice(answers, len(answers)).mean()) * per_request
        deployment = model.deployment(output)
        then, present = (
            rates(deployment, divide(deployment, some, p.threshold, Reading.MEAN_SERVICE), p.prefill).lambda_max
            for p in (best, now)
        )
        gains[i] = ratio(then, present)
    return gains


def _advice(
    now: Point, best: Point, gain: float, low: float, rate: float, settings: ControllerSettings
) -> tuple[Advice, str]:
    load = ratio(rate, now.lambda_max)
    if gain < settings.start_gain:
        return Advice.KEEP, (
            f"The best point there is would carry {gain:.2f} times as much; below {settings.start_gain:g} a change is "
            "not worth its trouble."
        )
    if low < 1:
        return Advice.UNSURE, (
            f"Another point would probably carry {gain:.2f} times as much, but the requests seen also allow "
            f"{low:.2f}. More traffic will tell."
        )
    urgent = f"{load * 100:.0f} % of the present capacity is used"
    urgent += "." if load >= settings.busy_floor else ", so nothing is urgent."
    if best.prefill == now.prefill:
        return Advice.RETUNE, f"The split is right as it is. {urgent}"
    return Advice.REBALANCE, urgent


def _stages(seen: Observation, model: FleetModel, now: Point, best: Point, rate: float) -> tuple[StageBalance, ...]:
    here, then = model.rates(now.prefill, now.threshold), model.rates(best.prefill, best.threshold)
    remote = sum(nodes.count for cluster in seen.clusters for nodes in cluster.nodes)

    def stage(name: str, nodes: float, share: float, theta: float, full_then: float, of: Stage | None) -> StageBalance:
        limit = full_at(theta, share)
        busy = [node.busy for node in seen.nodes if node.stage is of and node.becoming is None]
        waiting = {Stage.PREFILL: seen.waiting_prefill, Stage.DECODE: seen.waiting_decode}
        return StageBalance(
            name,
            nodes,
            share,
            theta,
            limit,
            ratio(rate, limit) if share > 0 else 0.0,
            full_then,
            sum(busy) / len(busy) if busy else None,
            None if of is None else waiting[of],
        )

    p, p_then = here.demand.p, then.demand.p
    return (
        stage("prefill at home", here.n_p, 1 - p, here.theta_pdp, full_at(then.theta_pdp, 1 - p_then), Stage.PREFILL),
        stage(
            "prefill in clusters",
            remote,
            p,
            here.demand.theta_prfaas,
            full_at(then.demand.theta_prfaas, p_then),
            None,
        ),
        stage("decode", here.n_d, 1.0, here.theta_pdd, then.theta_pdd, Stage.DECODE),
    )


def _surface(model: FleetModel) -> Surface:
    """Lambda_max over thresholds and splits, both thinned out to what a picture can show."""
    means = model.lengths.means
    thresholds = np.unique(np.geomspace(max(1.0, means[0] * 0.9), means[-1] * 1.02, THRESHOLDS))
    deployment = model.deployment(model.output_tokens)
    demands = [divide(deployment, model.lengths, float(t), Reading.MEAN_SERVICE) for t in thresholds]
    total = sum(model.counts)
    counts = sorted({round(n) for n in np.linspace(0, total - 1, min(SPLITS, total))})
    values, peaks = [], []
    for n in counts:
        row = [rates(deployment, demand, _fill(model, demand.short_s, n)).lambda_max for demand in demands]
        values.append(tuple(row))
        split = _fill(model, demands[int(np.argmax(row))].short_s, n)
        peaks.append((model.fleet.prefill(split)[1], model.fleet.lambda_max(split, model.output_tokens)))
    return Surface(tuple(float(t) for t in thresholds), tuple(counts), tuple(values), tuple(peaks))


def _fill(model: FleetModel, short_s: Sequence[float], nodes: int) -> tuple[int, ...]:
    """So many local nodes prefill: first of the kind that is comparatively better at it."""
    kinds = model.seen.kinds
    order = sorted(range(len(kinds)), key=lambda i: short_s[i] * kinds[i].decode.tokens_per_s)
    filled = [0] * len(kinds)
    for i in order:
        filled[i] = min(nodes, model.counts[i])
        nodes -= filled[i]
    return tuple(filled)
