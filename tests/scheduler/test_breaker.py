from __future__ import annotations

import pytest

from scheduler.breaker import Breaker, BreakerState, BreakerValues


def fail(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        breaker.begin(now).end(False, now)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    fail(breaker, 10, now)
    return breaker


def test_ten_failures_in_a_row_open_it_and_nine_do_not() -> None:
    breaker = Breaker()
    fail(breaker, 9)
    assert breaker.admits(0.0)
    fail(breaker, 1)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.admits(59.9)
    assert breaker.retry_after_s(20.0) == 40.0


def test_a_success_among_them_begins_the_count_anew() -> None:
    breaker = Breaker()
    fail(breaker, 9)
    breaker.begin(0.0).end(True, 0.0)
    fail(breaker, 9)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_after_a_minute_one_at_a_time_is_on_trial() -> None:
    breaker = opened()
    assert breaker.state(60.0) is BreakerState.HALF_OPEN
    trial = breaker.begin(60.0)
    assert not breaker.admits(60.0)
    trial.end(True, 60.1)
    assert breaker.admits(60.1)


def test_three_successes_on_trial_close_it() -> None:
    breaker = opened()
    for _ in range(2):
        breaker.begin(60.0).end(True, 60.0)
    assert breaker.state(60.0) is BreakerState.HALF_OPEN
    breaker.begin(60.0).end(True, 60.0)
    assert breaker.state(60.0) is BreakerState.CLOSED
    fail(breaker, 9, 61.0)
    assert breaker.admits(61.0), "old failures are forgotten"


def test_a_failure_on_trial_opens_it_for_another_minute_and_earlier_successes_count_no_more() -> None:
    breaker = opened()
    breaker.begin(60.0).end(True, 60.0)
    breaker.begin(60.0).end(True, 60.0)
    breaker.begin(61.0).end(False, 61.0)
    assert breaker.state(120.9) is BreakerState.OPEN
    breaker.begin(121.0).end(True, 121.0)
    assert breaker.state(121.0) is BreakerState.HALF_OPEN
    assert breaker.opened == 2


def test_a_trial_whose_client_left_says_nothing_and_makes_room() -> None:
    breaker = opened()
    breaker.begin(60.0).end(None, 60.0)
    assert breaker.state(60.0) is BreakerState.HALF_OPEN
    assert breaker.admits(60.0)


def test_what_was_begun_before_it_opened_neither_closes_it_nor_opens_it_again() -> None:
    breaker = Breaker()
    early = [breaker.begin(0.0) for _ in range(4)]
    fail(breaker, 10)
    for call in early[:3]:
        call.end(True, 30.0)
    assert breaker.state(30.0) is BreakerState.OPEN
    early[3].end(False, 61.0)
    assert breaker.state(61.0) is BreakerState.HALF_OPEN, "a straggler's failure is no trial's"


def test_one_that_was_sent_regardless_of_a_trial_under_way_does_not_count() -> None:
    breaker = opened()
    trial, other = breaker.begin(60.0), breaker.begin(60.0)
    other.end(False, 60.0)
    assert breaker.state(60.0) is BreakerState.HALF_OPEN
    trial.end(True, 60.0)
    assert breaker.admits(60.0)


def test_a_call_ends_once() -> None:
    breaker = Breaker(BreakerValues(failures=2))
    call = breaker.begin(0.0)
    call.end(False, 0.0)
    call.end(False, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED


@pytest.mark.parametrize("values", [{"failures": 0}, {"successes": 0}, {"open_s": 0.0}])
def test_values_that_could_never_open_or_close_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BreakerValues(**values)  # type: ignore[arg-type]


def test_evidence_opens_it_at_once_and_it_closes_as_after_failures() -> None:
    breaker = Breaker()
    under_way = breaker.begin(0.0)
    breaker.trip(1.0)
    under_way.end(True, 2.0)
    assert breaker.state(60.9) is BreakerState.OPEN, "what was begun before says nothing any more"
    for at in (61.0, 62.0, 63.0):
        assert breaker.state(at) is BreakerState.HALF_OPEN
        breaker.begin(at).end(True, at)
    assert breaker.state(63.0) is BreakerState.CLOSED
    assert breaker.opened == 1
