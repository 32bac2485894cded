"""Fractional roles: a node that prefills part of its time, either by planned conversions or by chunks between steps.

Whole nodes leave capacity lying about: the best whole split of the published case study serves 3.22 req/s, its
fractional bound is 3.39. ``time_share`` alternates two neighbouring splits and pays a node's absence for every
conversion; ``mixed_chunks`` lets decode nodes prefill between their steps and pays in time per output token. Both plan
with averages over a period: what queues up in one part of it is served in the other, at the price of a wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import floor, inf

from scheduler.lengths import LengthDistribution
from scheduler.split_search import SplitSearch
from scheduler.throughput import Deployment, Rates, Reading

LONGEST_PERIOD_S = 7200.0
_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class TimeShare:
    """Alternate between two splits that differ by one node.

    A period is ``first_s`` in ``first``, a conversion, ``second_s`` in ``second``, a conversion back; the node is away
    for ``conversion_s`` each time. Each split has its own threshold, in ``demand.t``; a conversion runs with that of
    ``first``. ``wait_s`` is the longest wait that alternation alone adds.
    """

    first: Rates
    second: Rates
    first_s: float
    second_s: float
    conversion_s: float
    lambda_max: float
    wait_s: float

    @property
    def period_s(self) -> float:
        """From one beginning of ``first`` to the next."""
        return self.first_s + self.second_s + 2 * self.conversion_s

    @property
    def conversions_per_hour(self) -> float:
        """Both directions counted."""
        return 2 * 3600.0 / self.period_s


@dataclass(frozen=True, slots=True)
class MixedChunks:
    """Whole nodes prefill, and every decode node gives ``share`` of its time to prefill chunks, by kind.

    ``rates`` counts those shares as parts of prefill nodes. ``chunk_tokens`` prompt tokens fit between two steps of a
    decode node of each kind without its streams falling behind ``tpot_s`` seconds a token.
    """

    prefill: tuple[int, ...]
    share: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    tpot_s: tuple[float, ...]
    rates: Rates

    @property
    def lambda_max(self) -> float:
        """Requests per second."""
        return self.rates.lambda_max


def time_share(
    deployment: Deployment, lengths: LengthDistribution, conversion_s: float, wait_s: float
) -> TimeShare | None:
    """The best alternation whose added wait stays below ``wait_s``; None where no alternation beats standing still.

    ``conversion_s`` is how long the node is away each time, drain included. Raises ValueError unless both are positive.
    """
    if conversion_s <= 0 or wait_s <= 0:
        raise ValueError(f"conversion_s and wait_s must be positive, got {conversion_s} and {wait_s}")
    search = SplitSearch(deployment, lengths, Reading.MEAN_SERVICE)
    splits = {found.prefill: found for found in search.splits()}
    still = max(found.lambda_max for found in splits.values())
    best: TimeShare | None = None
    for prefill, first in splits.items():
        for kind in range(len(prefill)):
            second = splits.get(tuple(n + (i == kind) for i, n in enumerate(prefill)))
            plan = None if second is None else _longest_within(first, second, conversion_s, wait_s)
            if plan is not None and plan.lambda_max > max(still, best.lambda_max if best else 0.0):
                best = plan
    return best


def mixed_chunks(deployment: Deployment, lengths: LengthDistribution, tpot_s: float) -> MixedChunks:
    """The best mix in which no stream takes longer than ``tpot_s`` a token.

    Raises ValueError where a kind of node is slower than that even without any prefill.
    """
    for nodes in deployment.local:
        if nodes.decode.step_s > tpot_s:
            raise ValueError(
                f"tpot_s: {tpot_s} is below the step of {nodes.prefill.name}, {nodes.decode.step_s} s; allow more"
            )
    search = SplitSearch(deployment, lengths, Reading.MEAN_SERVICE)
    ideal = search.fractional().prefill
    most = tuple(1 - nodes.decode.step_s / tpot_s for nodes in deployment.local)
    found = []
    for up in product((0, 1), repeat=len(ideal)):
        whole = tuple(
            min(floor(part) + extra, nodes.count)
            for part, extra, nodes in zip(ideal, up, deployment.local, strict=True)
        )
        if all(n == nodes.count for n, nodes in zip(whole, deployment.local, strict=True)):
            continue
        share = tuple(
            min(max((part - n) / (nodes.count - n), 0.0), limit) if n < nodes.count else 0.0
            for part, n, nodes, limit in zip(ideal, whole, deployment.local, most, strict=True)
        )
        spread = [n + x * (nodes.count - n) for n, x, nodes in zip(whole, share, deployment.local, strict=True)]
        found.append((whole, share, search.threshold(spread)))
    whole, share, rates = max(found, key=lambda each: (each[2].lambda_max, -sum(each[1])))
    tpots = tuple(nodes.decode.step_s / (1 - x) for nodes, x in zip(deployment.local, share, strict=True))
    per_token = [seconds / rates.demand.l_short if rates.demand.l_short else inf for seconds in rates.demand.short_s]
    chunks = tuple(
        floor((tpot - nodes.decode.step_s) / each)
        for tpot, nodes, each in zip(tpots, deployment.local, per_token, strict=True)
    )
    return MixedChunks(whole, share, chunks, tpots, rates)


def _longest_within(first: Rates, second: Rates, away_s: float, wait_s: float) -> TimeShare | None:
    """The longest period that keeps the wait: conversions cost least in it."""
    low, high = 2 * away_s, LONGEST_PERIOD_S
    plan = _divided(first, second, away_s, high)
    if plan is not None and plan.wait_s <= wait_s:
        return plan
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        plan = _divided(first, second, away_s, middle)
        low, high = (middle, high) if plan is None or plan.wait_s <= wait_s else (low, middle)
    return _divided(first, second, away_s, low)


def _divided(first: Rates, second: Rates, away_s: float, period_s: float) -> TimeShare | None:
    """The period divided so that prefill and decode serve the same on average; None where one split alone does best.

    While the node is away prefill has what it has in ``first`` and decode what it has in ``second``.
    """
    more, less = second.prefill_limit - first.prefill_limit, first.theta_pdd - second.theta_pdd
    free = period_s - 2 * away_s
    # first_s where: prefill's average = decode's average, both linear in it
    lacking = period_s * (first.prefill_limit - second.theta_pdd) + free * more
    if more + less <= 0:
        return None
    first_s = lacking / (more + less)
    if not 0 < first_s < free:
        return None
    second_s = free - first_s
    rate = first.prefill_limit + more * second_s / period_s
    waits = (
        (rate - first.prefill_limit) * (first_s + 2 * away_s) / second.prefill_limit,
        (rate - second.theta_pdd) * (second_s + 2 * away_s) / first.theta_pdd,
    )
    return TimeShare(first, second, first_s, second_s, away_s, rate, max(waits))
