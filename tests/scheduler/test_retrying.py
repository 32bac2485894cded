from __future__ import annotations

import pytest

from scheduler.retrying import Failure, RetryBudget, Retrying, RetryValues, failure_of

MIDDLE = 0.5
"""The chance that leaves a pause as it is."""


def retrying(budget: RetryBudget | None = None) -> Retrying:
    return Retrying(budget or RetryBudget(), 0.0)


def test_pauses_double_from_50_ms_up_to_30_s() -> None:
    values = RetryValues()
    assert [values.pause_s(tried, MIDDLE) for tried in (1, 2, 3)] == pytest.approx([0.05, 0.1, 0.2])
    assert values.pause_s(500, MIDDLE) == 30.0


def test_pauses_are_up_to_a_fifth_shorter_or_longer() -> None:
    assert RetryValues().pause_s(1, 0.0) == pytest.approx(0.04)
    assert RetryValues().pause_s(1, 0.999999) == pytest.approx(0.06)


def test_five_tries_are_the_most() -> None:
    one = retrying()
    pauses = [one.next_s(Failure.LOST, False, 0.0, 1000.0, MIDDLE) for _ in range(5)]
    assert [pause is not None for pause in pauses] == [True, True, True, True, False]
    assert one.tried == 5


def test_nothing_is_repeated_after_the_first_byte() -> None:
    assert retrying().next_s(Failure.LOST, True, 0.0, 1000.0, MIDDLE) is None


def test_the_requests_own_fault_is_not_repeated() -> None:
    assert retrying().next_s(Failure.REQUEST, False, 0.0, 1000.0, MIDDLE) is None


def test_no_pause_reaches_beyond_the_deadline() -> None:
    assert retrying().next_s(Failure.BUSY, False, 0.0, 2.0, MIDDLE, retry_after_s=2.0) is None
    assert retrying().next_s(Failure.BUSY, False, 0.0, 2.1, MIDDLE, retry_after_s=2.0) == 2.0


def test_a_backend_that_fails_for_everybody_gets_a_fifth_more_and_no_multiple() -> None:
    budget, sent = RetryBudget(), 0
    for at in range(1000):
        now = at / 100
        one, sent = Retrying(budget, now), sent + 1
        while one.next_s(Failure.BROKEN, False, now, 1000.0, MIDDLE) is not None:
            sent += 1
    assert sent == pytest.approx(1000 + 200 + 10 + 10, abs=2), "a share, one a second, and what was kept"


def test_a_retry_that_did_not_fit_the_budget_is_not_counted_as_tried() -> None:
    one = retrying(RetryBudget(most=0.5))
    assert one.next_s(Failure.LOST, False, 0.0, 1000.0, MIDDLE) is None
    assert one.tried == 1


def test_a_quiet_gateway_earns_retries_with_time() -> None:
    budget = RetryBudget(share=0.0)
    assert all(budget.spend(0.0) for _ in range(10))
    assert not budget.spend(0.5)
    assert budget.spend(1.0)


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (200, None),
        (302, None),
        (400, Failure.REQUEST),
        (404, Failure.REQUEST),
        (408, Failure.LATE),
        (429, Failure.BUSY),
        (500, Failure.BROKEN),
        (501, Failure.REQUEST),
        (502, Failure.BROKEN),
        (503, Failure.BUSY),
        (504, Failure.LATE),
    ],
)
def test_a_status_says_whether_another_try_can_help(status: int, failure: Failure | None) -> None:
    assert failure_of(status) is failure
