"""Probes take at most a fiftieth of what a link carries, and only of one that is idle and wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.probing import (
    AGAIN_S,
    EVERY_S,
    LEAST_BYTES,
    MOST_BYTES,
    QUIET_S,
    SHARE,
    SLOWEST_BYTES_PER_S,
    WANTED_S,
    ProbeBudget,
)
from tests.calm import calm


def saved(rate: float | None, seconds: float) -> ProbeBudget:
    """A budget of a wanted, idle link of this rate after so many seconds."""
    budget = ProbeBudget()
    for n in range(int(seconds * 4) + 1):
        budget.save(rate, n / 4)
    budget.wanted(seconds)
    return budget


def test_a_slow_link_is_probed_often_enough_to_see_it_recover_within_5_s() -> None:
    budget, now, sizes = saved(6.25e6, 0.0), 0.0, []
    while now < 10.0:
        budget.save(6.25e6, now)
        budget.wanted(now)
        if nbytes := budget.due(now, faster=False):
            budget.spend(nbytes, now)
            sizes.append(nbytes)
        now += 0.25
    assert len(sizes) >= 5
    assert min(sizes) >= LEAST_BYTES


def test_a_link_that_carries_something_or_that_nobody_asks_about_is_not_probed() -> None:
    budget = saved(125e6, 10.0)
    assert budget.due(10.0, faster=False)
    assert budget.due(10.0 + WANTED_S, faster=False)
    assert not budget.due(10.1 + WANTED_S, faster=False)
    budget.carried(10.0)
    assert not budget.due(10.0 + QUIET_S / 2, faster=False)
    assert budget.due(10.0 + QUIET_S, faster=False)


def test_one_probe_is_given_time_before_the_next() -> None:
    budget = saved(125e6, 10.0)
    budget.spend(LEAST_BYTES, 10.0)
    assert not budget.due(10.0 + 0.9 * EVERY_S, faster=False)
    assert budget.due(10.0 + EVERY_S, faster=False)


def test_a_probe_that_found_the_link_faster_is_followed_by_one_from_the_reserve() -> None:
    budget = saved(125e6, 1000.0)
    first = budget.due(1000.0, faster=False)
    budget.spend(first, 1000.0)
    assert not budget.due(1000.0 + AGAIN_S, faster=False)
    assert not budget.due(1000.0 + AGAIN_S / 2, faster=True)
    assert first + budget.due(1000.0 + AGAIN_S, faster=True) == MOST_BYTES


def test_what_is_saved_is_bounded_and_any_link_is_taken_to_carry_a_little() -> None:
    assert saved(125e6, 1000.0).due(1000.0, faster=True) == MOST_BYTES
    little = SHARE * SLOWEST_BYTES_PER_S * 8
    for rate in (None, 1.0):
        assert saved(rate, 8.0).due(8.0, faster=True) == pytest.approx(little, abs=16 << 10)
        assert saved(rate, 8.0).due(8.0, faster=False) == max(LEAST_BYTES, int(little / 2) // 16384 * 16384)


@calm
@given(st.lists(st.tuples(st.floats(0, 5), st.one_of(st.none(), st.floats(0, 1e10))), max_size=60))
def test_probes_never_take_more_than_their_share(steps: list[tuple[float, float | None]]) -> None:
    budget, now, spent, carried = ProbeBudget(), 0.0, 0, 0.0
    budget.save(None, now)
    for took, rate in steps:
        now += took
        carried += took * max(SLOWEST_BYTES_PER_S, rate or 0.0)
        budget.save(rate, now)
        budget.wanted(now)
        if nbytes := budget.due(now, faster=False):
            budget.spend(nbytes, now)
            spent += nbytes
        assert spent <= SHARE * carried + 1e-3
