"""Slices of limits: a share of each rate, a number of requests at once."""

import pytest

from scheduler.admission.limits import Limits, Slice, Usage

HALF = Slice(0.5, 0.5, 2)


def passed(usage, until, step=0.01, tokens=0):
    count, now = 0, 0.0
    while now < until:
        if usage.refusal(now) is None and (not tokens or usage.token_refusal(tokens, now) is None):
            usage.begin(now)
            usage.spend(tokens, now)
            usage.end()
            count += 1
        now += step
    return count


def test_half_a_limit_lets_half_of_it_in():
    whole, half = Usage(Limits(600), 0.0), Usage(Limits(600), 0.0, HALF)
    assert passed(whole, 60) == pytest.approx(630, abs=2)
    assert passed(half, 60) == pytest.approx(315, abs=2)


def test_a_slice_of_slots_bounds_what_runs_and_the_refusal_tells_the_limit():
    usage = Usage(Limits(concurrency=5), 0.0, HALF)
    usage.begin(0.0)
    usage.begin(0.0)
    assert usage.refusal(0.0).value == 5
    assert usage.exhausted(0.0)
    usage.lease(Slice(1.0, 1.0, 3), 0.0)
    assert usage.refusal(0.0) is None


def test_shares_that_move_make_no_more_of_what_may_come_at_once():
    a, b = Usage(Limits(600), 0.0, Slice(0.9)), Usage(Limits(600), 0.0, Slice(0.1))
    first = passed(a, 0.02, 0.0005)
    a.lease(Slice(0.1), 0.02)
    b.lease(Slice(0.9), 0.02)
    assert first + passed(b, 0.02, 0.0005) <= 30 + 2


def test_what_is_owed_stays_owed_over_a_change_of_the_slice():
    usage = Usage(Limits(tokens_per_minute=600), 0.0, HALF)
    usage.spend(100, 0.0)
    usage.lease(Slice(), 0.0)
    assert usage.token_refusal(1, 8.0) is not None
    assert usage.token_refusal(1, 9.0) is None


def test_demand_counts_what_was_turned_away_too_and_is_told_once():
    usage = Usage(Limits(60, 600, 1), 0.0)
    assert usage.refusal(0.0) is None
    usage.begin(0.0)
    assert usage.token_refusal(50, 0.0) is None
    assert usage.refusal(0.0).limit == "concurrency"
    assert (usage.demand().requests, usage.demand().requests) == (1, 0)


def test_a_share_of_nothing_still_lets_one_in_and_owes_it():
    usage = Usage(Limits(600), 0.0, Slice(0.0, 0.0, 1))
    assert usage.refusal(0.0) is None
    usage.begin(0.0)
    wait = usage.refusal(1.0)
    assert wait is not None
    assert wait.retry_after_s <= 60
