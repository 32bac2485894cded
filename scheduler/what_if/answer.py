"""The answer to a what-if question: today, the change with today's split and threshold, and the change at its best."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import isfinite

import msgspec

from scheduler.controller.capacity import Split
from scheduler.operating_point import FleetModel
from scheduler.values import PolicyValues
from scheduler.what_if.basis import PRESET_LOAD, Basis, changed
from scheduler.what_if.cases import Case, model_of, modelled, simulated
from scheduler.what_if.question import Question

READING = (
    "The model's Lambda_max is in the mean_service reading, the true limit of stability; lambda_point is the reading "
    "of most published figures. It has no queueing; what waiting there is below the limit the simulation shows."
)
SIMULATED = (
    "Simulated: {requests} requests a case, the first fifth not counted, one seed, every length equally often; KV "
    "uncompressed, no prefix cache, no failures, no conversions. Below 20,000 requests a difference of a few per cent "
    "says nothing."
)


class Answer(msgspec.Struct, frozen=True):
    """``cases`` are named today, unbalanced and rebalanced; ``gain`` is Lambda_max of the last over the first.

    ``unbalanced`` has the present threshold, and nodes that were added go wherever they help most; no other node
    changes its role. ``rebalanced`` is the best split with its best threshold, or what the question fixes.
    """

    question: Question
    cases: tuple[Case, ...]
    gain: float
    notes: tuple[str, ...]


def answer(
    basis: Basis, question: Question, values: PolicyValues, progress: Callable[[float], None] = lambda _: None
) -> Answer:
    """Work it out; ``progress`` hears shares from 0 to 1. Raises ValueError for a question that does not fit."""
    then = changed(basis, question)
    before, after = model_of(basis), model_of(then)
    _check(before, after, question)
    at_home = before.effective(basis.seen.threshold, before.split)
    rate = question.rate or basis.rate
    if rate is None:
        rate = PRESET_LOAD * before.point(before.split, at_home, 0.0).lambda_max
    rate_then = rate * question.traffic_scale
    kept = _kept(before, after, at_home)
    best = _best(after, question)
    planned = (
        ("today", basis, before, before.split, at_home, rate),
        ("unbalanced", then, after, kept, after.effective(basis.seen.threshold, kept), rate_then),
        ("rebalanced", then, after, *best, rate_then),
    )
    cases = []
    for index, (name, one, model, split, threshold, offered) in enumerate(planned):

        def heard(arrived: int, index: int = index) -> None:
            progress((index + min(1.0, arrived / question.requests)) / len(planned))

        figures = simulated(one, split, threshold, offered, question.requests, question.seed, values, heard)
        cases.append(Case(name, modelled(one, model, split, threshold, offered), figures))
        progress((index + 1) / len(planned))
    first, last = cases[0].model.point.lambda_max, cases[-1].model.point.lambda_max
    notes = (*then.notes, READING, SIMULATED.format(requests=question.requests))
    return Answer(question, tuple(cases), last / first if first else float("inf"), notes)


def _check(before: FleetModel, after: FleetModel, question: Question) -> None:
    if question.prefill is not None and question.prefill > sum(after.counts) - (1 if after.counts else 0):
        raise ValueError(
            f"prefill: {question.prefill} of {sum(after.counts)} local nodes leaves none to decode; "
            f"at most {sum(after.counts) - 1}"
        )
    if not before.seen.clusters and not sum(before.split):
        raise ValueError("the fleet has no prefill node: decode nodes do it in place, which cannot be planned with")


def _kept(before: FleetModel, after: FleetModel, threshold: float) -> Split:
    """Today's split, with what was added or taken away wherever that leaves the most."""
    ranges = []
    for was, count, now in zip(before.split, before.counts, after.counts, strict=True):
        low, high = max(0, was - max(0, count - now)), was + max(0, now - count)
        ranges.append(range(low, min(high, now) + 1))
    splits = [split for split in product(*ranges) if sum(split) < sum(after.counts)]
    return max(splits, key=lambda split: after.point(split, after.effective(threshold, split), 0.0).lambda_max)


def _best(after: FleetModel, question: Question) -> tuple[Split, float]:
    """The best split and threshold, as far as the question leaves them open."""
    fixed = question.threshold
    if question.prefill is None:
        split = after.fleet.best(after.output_tokens, after.split)
    else:
        split = max(
            (s for s in product(*(range(n + 1) for n in after.counts)) if sum(s) == question.prefill),
            key=lambda s: after.fleet.lambda_max(s, after.output_tokens),
        )
    threshold = after.fleet.prefill(split)[1] if fixed is None else float(fixed)
    chosen = after.effective(threshold, split)
    return split, chosen if isfinite(chosen) or not after.seen.clusters else threshold
