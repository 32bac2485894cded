"""Token buckets: what passes in any window, and that the rate is really to be had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission.bucket import TokenBucket
from tests.calm import calm


@calm
@given(
    st.floats(0.1, 100),
    st.floats(1, 50),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 80)), min_size=1, max_size=80),
)
def test_no_window_passes_more_than_its_rate_and_a_burst(
    per_s: float, burst: float, arrivals: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(per_s, burst, 0.0)
    now, passed = 0.0, []
    for pause, cost in arrivals:
        now += pause
        if not bucket.wait_s(cost, now):
            bucket.spend(cost, now)
            passed.append((now, cost))
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            window = passed[first : last + 1]
            bound = per_s * (window[-1][0] - window[0][0]) + max(burst, *(cost for _, cost in window))
            assert sum(cost for _, cost in window) <= bound * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("cost", [1.0, 7.0, 250.0])
def test_who_comes_again_when_told_gets_the_whole_rate(cost: float) -> None:
    bucket = TokenBucket(10.0, 30.0, 0.0)
    now, passed = 0.0, 0.0
    while now < 600.0:
        wait = bucket.wait_s(cost, now)
        if wait:
            now += wait
        else:
            bucket.spend(cost, now)
            passed += cost
    assert passed == pytest.approx(6000.0, abs=30.0 + cost)


def test_what_is_given_back_can_be_used_and_a_slower_rate_forgets_no_debt() -> None:
    bucket = TokenBucket(1.0, 10.0, 0.0)
    bucket.spend(40.0, 0.0)
    assert bucket.wait_s(10.0, 0.0) == 40.0
    bucket.spend(-35.0, 0.0)
    assert bucket.wait_s(5.0, 0.0) == 0.0
    bucket.spend(10.0, 0.0)
    bucket.change(0.5, 2.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == 12.0
    assert not bucket.full(13.0)
    assert bucket.full(14.0)


def test_a_clock_that_stands_or_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(1.0, 1.0, 10.0)
    bucket.spend(1.0, 10.0)
    assert bucket.wait_s(1.0, 4.0) == 1.0
    assert bucket.wait_s(1.0, 10.0) == 1.0
