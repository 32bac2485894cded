"""Distributions of lengths: the log-normal against its closed forms, the histogram against plain lists."""

from __future__ import annotations

from math import erf, exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.lengths import FloatArray, TruncatedLogNormal, identity, mean_length
from scheduler.observed_lengths import LengthHistogram, ObservedLengths

PAPER = TruncatedLogNormal(9.90, 1.00, 128, 131_072)


def moment(d: TruncatedLogNormal, k: int, low: float, high: float) -> float:
    """E[L^k; low < L <= high] in closed form."""

    def phi(z: float) -> float:
        return (1 + erf(z / sqrt(2))) / 2

    def z(tokens: float) -> float:
        return (log(tokens) - d.mu) / d.sigma

    mass = phi(z(d.high)) - phi(z(d.low))
    part = phi(z(high) - k * d.sigma) - phi(z(low) - k * d.sigma)
    return exp(k * d.mu + (k * d.sigma) ** 2 / 2) * part / mass


def observed(lengths: list[int]) -> ObservedLengths:
    histogram = LengthHistogram(half_life_s=1e9)
    for tokens in lengths:
        histogram.add(tokens, now=0.0)
    snapshot = histogram.snapshot()
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize(("low", "high"), [(128, 131_072), (128, 19_400), (19_400, 131_072), (60_000, 61_000)])
def test_partial_moments_equal_their_closed_forms(power: int, low: float, high: float) -> None:
    found = PAPER.expect(lambda tokens: tokens**power, low, high)
    assert found == pytest.approx(moment(PAPER, power, low, high), rel=1e-10)


def test_the_published_lengths_have_the_derived_mean_shares_and_percentile() -> None:
    assert mean_length(PAPER) == pytest.approx(27_486, abs=1)
    assert PAPER.above(19_400) == pytest.approx(0.4957, abs=5e-5)
    assert mean_length(PAPER, low=19_400) == pytest.approx(45_046, abs=1)
    assert mean_length(PAPER, high=19_400) == pytest.approx(10_224, abs=1)
    assert PAPER.quantile(0.9) == pytest.approx(62_400, abs=20)


def test_nothing_lies_outside_the_bounds() -> None:
    assert PAPER.above(127) == 1
    assert PAPER.above(131_072) == 0
    assert PAPER.expect(identity, 0, 128) == 0 == PAPER.expect(identity, 131_072, 1e9)


@pytest.mark.parametrize("sigma", [0.2, 0.3, 0.5, 1.5])
def test_the_mean_of_a_class_lies_within_the_class_however_small_it_is(sigma: float) -> None:
    d = TruncatedLogNormal(9.0, sigma, 128, 131_072)
    for t in (float(t) for t in d.thresholds()):
        if d.above(t) > 0:
            assert t * (1 - 1e-3) <= mean_length(d, low=t) <= d.high
        if d.above(t) < 1:
            assert d.low <= mean_length(d, high=t) <= t * (1 + 1e-3)


@given(q=st.floats(0.001, 0.999))
def test_a_quantile_has_its_share_below_it(q: float) -> None:
    assert PAPER.above(PAPER.quantile(q)) == pytest.approx(1 - q, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "named"),
    [((9, 0, 1, 2), "sigma"), ((9, 1, 2, 1), "bounds"), ((9, 1, 0, 1), "bounds"), ((9, 0.1, 1, 2), "holds less")],
)
def test_impossible_parameters_are_refused_by_name(values: tuple[float, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TruncatedLogNormal(*values)


def test_an_empty_class_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no length lies in"):
        mean_length(PAPER, low=131_072)


@given(lengths=st.lists(st.integers(1, 2**25), min_size=1, max_size=40))
@settings(max_examples=50)
def test_what_was_observed_keeps_its_mean_and_every_share_to_a_bin(lengths: list[int]) -> None:
    seen = observed(lengths)
    assert mean_length(seen) == pytest.approx(sum(lengths) / len(lengths), rel=1e-12)
    for t in lengths:

        def share(edge: float) -> float:
            return sum(tokens > edge for tokens in lengths) / len(lengths)

        assert share(t * 1.022) - 1e-12 <= seen.above(t) <= share(t / 1.022) + 1e-12 or t >= 2**24


def test_thresholds_run_from_offloading_all_to_offloading_nothing() -> None:
    seen = observed([100, 5000, 5010, 80_000])
    assert [seen.above(float(t)) for t in seen.thresholds()] == [1.0, 0.75, 0.25, 0.0]
    assert PAPER.above(float(PAPER.thresholds()[0])) == 1
    assert PAPER.above(float(PAPER.thresholds()[-1])) == 0


def test_a_sample_of_the_published_lengths_is_worth_the_distribution() -> None:
    histogram = LengthHistogram(half_life_s=1e9)
    # stratified: one length from each of 4000 equal shares
    for i in range(4000):
        histogram.add(round(PAPER.quantile((i + 0.5) / 4000)), now=float(i))
    seen = histogram.snapshot()
    assert seen is not None

    def square(tokens: FloatArray) -> FloatArray:
        return tokens * tokens

    for f in (np.ones_like, identity, square):
        assert seen.expect(f, 19_400, 1e9) == pytest.approx(PAPER.expect(f, 19_400, 1e9), rel=0.01)
    assert seen.quantile(0.9) == pytest.approx(PAPER.quantile(0.9), rel=0.02)


def test_an_observation_counts_half_after_a_half_life() -> None:
    histogram = LengthHistogram(half_life_s=60)
    histogram.add(1000, now=0.0)
    histogram.add(9000, now=60.0)
    seen = histogram.snapshot()
    assert seen is not None
    assert seen.above(5000) == pytest.approx(2 / 3)
    assert histogram.weight(now=60.0) == pytest.approx(1.5)
    assert histogram.weight(now=120.0) == pytest.approx(0.75)


def test_a_histogram_forgets_old_traffic_however_long_it_runs() -> None:
    histogram = LengthHistogram(half_life_s=1)
    for second in range(0, 5000, 7):
        histogram.add(100 if second < 4900 else 50_000, now=float(second))
    seen = histogram.snapshot()
    assert seen is not None
    assert mean_length(seen) == pytest.approx(50_000, rel=1e-6)
    assert histogram.weight(now=4998.0) == pytest.approx(1.0, abs=0.02)


def test_a_mean_survives_however_often_weights_are_rescaled() -> None:
    histogram = LengthHistogram(half_life_s=1)
    for second in range(2000):
        histogram.add(1000, now=float(second))
    seen = histogram.snapshot()
    assert seen is not None
    assert mean_length(seen) == pytest.approx(1000)


def test_nothing_observed_is_no_distribution() -> None:
    histogram = LengthHistogram(half_life_s=1)
    assert histogram.snapshot() is None
    assert histogram.weight(now=5.0) == 0


def test_a_request_with_nothing_to_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to prefill"):
        LengthHistogram(half_life_s=1).add(0, now=0.0)
