"""Curves and times from observations."""

from __future__ import annotations

import pytest

from scheduler.fitting import Observed, fit_curve, fit_site, step_times, steps
from scheduler.measured import Site
from tests.scheduler.profiled import CURVE, HANDLING_S, RTT_S, SIZES, STEP_S, observed

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def fitted(seen: list[Observed], nodes: int = 1) -> Site:
    return fit_site("far", nodes, seen, SIZES, 256, STEP_S)


def test_the_terms_of_a_stack_are_found() -> None:
    found = fitted([observed(10.0 * n, tokens) for n, tokens in enumerate(LENGTHS)])
    for tokens in (100, 1000, 5000):
        assert found.prefill.seconds(0, tokens) == pytest.approx(CURVE.seconds(0, tokens), rel=1e-6)
    assert found.handling.fixed_s == pytest.approx(HANDLING_S, abs=1e-6)
    assert found.handling.token_s == pytest.approx(0.0, abs=1e-9)
    assert (found.rtt_s, found.bytes_per_s, found.codec, found.wire_ratio) == (RTT_S, 1e9, "raw", 1.0)


def test_handling_that_grows_with_length_is_a_line() -> None:
    seen = [observed(0.0, t, ttft_s=observed(0.0, t).ttft_s + 2e-5 * t) for t in LENGTHS]
    assert fitted(seen).handling.token_s == pytest.approx(2e-5, rel=0.01)


def test_one_prefill_that_was_held_up_does_not_bend_the_curve() -> None:
    seen = [observed(0.0, tokens) for tokens in LENGTHS]
    seen.append(observed(0.0, 1024, prefill_s=9.0))
    assert fitted(seen).prefill.seconds(0, 1024) == pytest.approx(CURVE.seconds(0, 1024), rel=0.02)


def test_a_prefix_that_was_cached_is_not_counted_as_computed() -> None:
    seen = [observed(0.0, tokens, cached=cached) for tokens in LENGTHS for cached in (0, tokens // 2)]
    found = fitted(seen).prefill
    assert found.seconds(2048, 4096) == pytest.approx(CURVE.seconds(2048, 4096), rel=1e-6)


def test_a_request_that_waited_says_nothing_of_handling() -> None:
    seen = [observed(0.0, tokens) for tokens in LENGTHS]
    seen += [observed(0.0, tokens, ttft_s=30.0, quiet=False) for tokens in LENGTHS * 2]
    assert fitted(seen).handling.fixed_s == pytest.approx(HANDLING_S, abs=1e-6)


def test_the_time_on_a_slow_link_is_not_taken_for_handling() -> None:
    seen = []
    for tokens in LENGTHS:
        sending = 1000 * tokens / 1e5
        ttft = max(CURVE.seconds(0, tokens), sending) + RTT_S + HANDLING_S + STEP_S
        seen.append(observed(0.0, tokens, bytes_per_s=1e5, ttft_s=ttft))
    assert fitted(seen).handling.fixed_s < HANDLING_S + 0.1


def test_a_link_does_what_it_was_seen_to_do_whatever_was_believed_of_it() -> None:
    seen = [observed(0.0, tokens, bytes_per_s=2000.0) for tokens in LENGTHS]
    assert 1e5 < fitted(seen).bytes_per_s < 1e9
    assert fitted(seen).handling.fixed_s == pytest.approx(HANDLING_S, abs=0.1)


def test_what_is_prefilled_in_place_counts_up_to_its_first_step() -> None:
    seen = [observed(0.0, t, in_place=True, prefill_s=None, ttft_s=CURVE.seconds(0, t) + STEP_S) for t in LENGTHS]
    found = fitted(seen, nodes=0)
    assert found.prefill.seconds(0, 700) == pytest.approx(CURVE.seconds(0, 700), rel=1e-6)
    assert found.handling.fixed_s == 0.0


@pytest.mark.parametrize("points", [[], [(0, 100, 0.1), (0, 1000, 1.0)], [(0, 100, 0.1)] * 9])
def test_prefills_that_say_too_little_are_refused_by_site(points: list[tuple[int, int, float]]) -> None:
    with pytest.raises(ValueError, match="site 'far': a curve needs at least 3 prefills"):
        fit_curve("site 'far'", points)


def test_a_site_where_something_always_waited_is_refused() -> None:
    with pytest.raises(ValueError, match="site 'far': only 0 of its requests found their nodes idle"):
        fitted([observed(0.0, tokens, quiet=False) for tokens in LENGTHS])


def test_no_term_of_a_curve_is_negative() -> None:
    falling = [(0, tokens, 1.0 / tokens) for tokens in LENGTHS]
    curve, error = fit_curve("site", falling)
    assert min(curve.fixed_s, curve.token_s, curve.square_s) >= 0
    assert error > 0.1


def test_streams_are_counted_by_how_they_overlap() -> None:
    alone = [observed(100.0, 64, output=11, spoken_s=1.0)]
    pair = [observed(0.0, 64, output=11, spoken_s=2.0), observed(0.0, 64, output=11, spoken_s=2.0)]
    elsewhere = [observed(0.0, 64, output=11, spoken_s=1.0, decode_node="other")]
    assert step_times(alone) == [(1.0, 0.1)]
    assert step_times([*pair, *elsewhere, *alone]) == [(1.0, 0.1), pytest.approx((2.0, 0.2))]


def test_a_few_tokens_say_nothing_of_a_step() -> None:
    assert step_times([observed(0.0, 64, output=2, spoken_s=5.0)]) == []
    with pytest.raises(ValueError, match="step_s: no answer"):
        steps([], 4)


def test_steps_lie_between_those_seen_and_never_fall() -> None:
    assert steps([(1.0, 0.1), (3.0, 0.2)], 4) == pytest.approx((0.1, 0.1, 0.15, 0.2, 0.25))
    assert steps([(1.0, 0.2), (3.0, 0.1)], 3) == pytest.approx((0.15,) * 4)
    assert steps([(1.0, 0.1), (2.0, 0.3), (3.0, 0.2)], 3) == pytest.approx((0.1, 0.1, 0.25, 0.25))


def test_a_curve_of_equal_lengths_with_prefixes_is_still_one() -> None:
    points = [(start, stop, CURVE.seconds(start, stop)) for start in (0, 512) for stop in (600, 1200, 4000)]
    curve, _ = fit_curve("site", points)
    assert curve.seconds(0, 2000) == pytest.approx(CURVE.seconds(0, 2000), rel=1e-4)
