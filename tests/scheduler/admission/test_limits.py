"""Limits of one key or tenant."""

from __future__ import annotations

import pytest

from scheduler.admission.limits import NO_LIMITS, Limit, Limits, Refusal, Usage


@pytest.mark.parametrize("a_minute", [60, 600, 6000])
def test_a_minute_of_hammering_gets_the_rate_within_a_twentieth(a_minute: int) -> None:
    usage = Usage(Limits(requests_per_minute=a_minute), 0.0)
    begun = 0
    for tick in range(60_000):
        now = tick / 1000
        if usage.refusal(now) is None:
            usage.begin(now)
            usage.end()
            begun += 1
    assert a_minute <= begun <= a_minute * 1.05


def test_tokens_that_were_reserved_and_not_used_are_given_back() -> None:
    usage = Usage(Limits(tokens_per_minute=6000), 0.0)
    used, now = 0, 0.0
    while now < 120.0:
        if usage.token_refusal(500, now) is None:
            usage.spend(500, now)
            usage.spend(110 - 500, now)
            used += 110
        now += 0.01
    assert used == pytest.approx(12_000, rel=0.05)


def test_one_more_than_may_run_at_once_is_refused_until_one_ends() -> None:
    usage = Usage(Limits(concurrency=2), 0.0)
    for _ in range(2):
        assert usage.refusal(0.0) is None
        usage.begin(0.0)
    assert usage.refusal(0.0) == Refusal(Limit.CONCURRENCY, 2, 1.0)
    usage.end()
    assert usage.refusal(0.0) is None


def test_a_refusal_says_which_limit_and_when_to_come_again() -> None:
    usage = Usage(Limits(requests_per_minute=6, tokens_per_minute=60), 0.0)
    usage.begin(0.0)
    assert usage.refusal(0.0) == Refusal(Limit.REQUESTS, 6, 10.0)
    assert usage.refusal(10.0) is None
    usage.spend(120, 10.0)
    assert usage.token_refusal(1, 10.0) == Refusal(Limit.TOKENS, 60, 118.0)


def test_changed_limits_hold_at_once_for_what_was_used_before() -> None:
    usage = Usage(NO_LIMITS, 0.0)
    usage.begin(0.0)
    usage.follow(Limits(requests_per_minute=60, concurrency=1), 0.0)
    assert usage.refusal(0.0) == Refusal(Limit.CONCURRENCY, 1, 1.0)
    usage.follow(Limits(requests_per_minute=60), 0.0)
    for _ in range(3):
        usage.begin(0.0)
    usage.follow(Limits(requests_per_minute=6), 0.0)
    assert usage.refusal(0.0) == Refusal(Limit.REQUESTS, 6, 10.0)
    usage.follow(NO_LIMITS, 0.0)
    assert usage.refusal(0.0) is None


def test_only_what_would_begin_as_new_may_be_forgotten() -> None:
    usage = Usage(Limits(requests_per_minute=60), 0.0)
    assert usage.unused(0.0)
    usage.begin(0.0)
    usage.end()
    assert not usage.unused(0.5)
    assert usage.unused(1.0)
