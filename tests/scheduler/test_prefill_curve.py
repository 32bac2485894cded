"""Prefill time over length, learnt from finished prefills."""

from __future__ import annotations

from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefill_curve import LASTS, PrefillTimes
from scheduler.profiles import H200
from tests.calm import calm


def seconds(start: int, stop: int) -> float:
    """What the case study's H200 instance takes, a prefix of ``start`` tokens being cached."""
    k, p = stop / 1000, start / 1000
    return H200.c0_s + H200.c1_s * (k - p) + H200.c2_s * (k * k - p * p)


def learnt(lengths: list[int], noise: float = 0.05) -> PrefillTimes:
    dice, times = Random(1), PrefillTimes()
    times.claim(10_000.0)
    for stop in lengths:
        start = dice.choice((0, 0, stop // 2 // 64 * 64))
        times.observe(start, stop, seconds(start, stop) * dice.uniform(1 - noise, 1 + noise))
    return times


def test_a_node_is_unmeasured_until_it_claims_or_shows_a_speed() -> None:
    times = PrefillTimes()
    assert (times.curve, times.tokens_per_s) == (None, None)
    times.claim(0.0)
    assert times.curve is None
    times.claim(500.0)
    assert times.tokens_per_s == 500.0
    assert times.curve is not None
    assert times.curve.seconds(0, 2000) == pytest.approx(4.0)


def test_over_lengths_as_traffic_brings_them_the_convex_curve_is_found_with_its_cached_prefixes() -> None:
    dice = Random(2)
    lengths = [min(131_072, max(128, int(dice.lognormvariate(9.9, 1.0)))) for _ in range(200)]
    curve = learnt(lengths).curve
    assert curve is not None
    for start, stop in ((0, 1000), (0, 8000), (0, 32_000), (0, 128_000), (64_000, 128_000)):
        assert curve.seconds(start, stop) == pytest.approx(seconds(start, stop), rel=0.06)


def test_one_rate_fitted_to_the_same_prefills_would_be_wrong_at_both_ends() -> None:
    """What the curve is for: at the mean length's rate 1K takes 0.06 s of 0.44 s, and 128K 7.9 s of 7.4 s."""
    assert seconds(0, 27_000) / 27_000 * 1000 < 0.2 * seconds(0, 1000)


def test_from_prefills_of_one_length_no_curvature_is_made_up() -> None:
    curve = learnt([2000] * 50).curve
    assert curve is not None
    assert curve.square_s == 0.0
    assert curve.seconds(0, 2000) == pytest.approx(seconds(0, 2000), rel=0.1)
    assert curve.seconds(0, 32_000) == pytest.approx(seconds(0, 32_000), rel=0.5)


def test_what_was_observed_outweighs_the_claim() -> None:
    times = PrefillTimes()
    times.claim(1e6)
    for _ in range(200):
        times.observe(0, 1000, 10.0)
    assert times.curve is not None
    assert times.curve.seconds(0, 1000) == pytest.approx(10.0, rel=0.01)


def test_a_first_short_prefill_hardly_moves_what_is_predicted_of_long_ones() -> None:
    times = PrefillTimes()
    times.claim(800.0)
    times.observe(0, 5, 0.2)
    assert times.curve is not None
    assert times.curve.seconds(0, 8000) == pytest.approx(10.0, rel=0.2)


def test_a_node_that_becomes_slower_is_believed() -> None:
    times = learnt([1000, 4000, 16_000, 64_000] * 10)
    for stop in (1000, 4000, 16_000, 64_000) * 25:
        times.observe(0, stop, 3 * seconds(0, stop))
    assert times.curve is not None
    for stop in (1000, 16_000, 64_000):
        assert times.curve.seconds(0, stop) == pytest.approx(3 * seconds(0, stop), rel=0.1)


def test_events_without_tokens_or_time_teach_nothing() -> None:
    times = PrefillTimes()
    for start, stop in ((0, 0), (10, 5), (-5, 5)):
        times.observe(start, stop, 1.0)
    for took in (0.0, -1.0, nan, inf, 5e-324, 1e308):
        times.observe(0, 10, took)
    for nonsense in (nan, inf, -1.0, 5e-324, 1e308):
        times.claim(nonsense)
    assert times.curve is None


@calm
@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 10**5), st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_whatever_was_seen_more_tokens_never_take_less(samples: list[tuple[int, int, float]]) -> None:
    times = PrefillTimes()
    for start, tokens, took in samples:
        times.observe(start, start + tokens, took)
    curve = times.curve
    assert curve is not None
    assert min(curve.fixed_s, curve.token_s, curve.square_s) >= 0
    assert 0 < curve.seconds(0, 1000) <= curve.seconds(0, 2000) < inf
    assert times.tokens_per_s is not None


def test_a_curve_is_fitted_anew_for_what_differs_and_after_a_while_and_not_for_what_says_the_same() -> None:
    times = PrefillTimes()
    times.observe(0, 1000, 10.0)
    fitted = times.curve
    for _ in range(LASTS - 1):
        times.observe(0, 1000, 10.0)
        assert times.curve is fitted
    times.observe(0, 1000, 10.0)
    assert times.curve is not fitted
    fitted = times.curve
    times.observe(0, 1000, 20.0)
    assert times.curve is not fitted
