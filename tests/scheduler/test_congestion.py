"""Congestion has two marks for each sign, and must last: a link at the edge does not flap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.congestion import ENTER, ENTER_S, LEAVE_S, STAY, Congestion, Signs
from tests.calm import calm

CALM = Signs(rate=100.0, best=100.0, loss=0.0, queue_s=0.0, least_rtt_s=0.03, utilisation=0.2)
SIGNS = {
    "loss": Signs(loss=0.06),
    "rate": Signs(rate=20.0, best=100.0),
    "queue": Signs(queue_s=0.1, least_rtt_s=0.03, utilisation=0.95),
}


def after(signs: list[tuple[Signs, float]], state: Congestion | None = None, start: float = 0.0) -> Congestion:
    """The state after these signs, each for so many seconds, looked at four times a second."""
    state, now = state or Congestion(), start
    for each, seconds in signs:
        for _ in range(round(seconds * 4)):
            now += 0.25
            state.update(each, now)
    return state


@pytest.mark.parametrize("sign", SIGNS)
def test_each_sign_alone_is_enough_once_it_has_lasted(sign: str) -> None:
    assert not after([(SIGNS[sign], ENTER_S)]).congested
    assert after([(SIGNS[sign], ENTER_S + 0.5)]).congested


def test_a_moment_of_it_is_not_enough_and_a_moment_without_it_is_not_the_end() -> None:
    assert not after([(SIGNS["loss"], 0.75), (CALM, 0.5)] * 5).congested
    assert after([(SIGNS["loss"], 2.0), *[(CALM, LEAVE_S - 0.5), (SIGNS["loss"], 0.5)] * 5]).congested
    assert not after([(SIGNS["loss"], 2.0), (CALM, LEAVE_S + 0.5)]).congested


@pytest.mark.parametrize(
    "between",
    [Signs(loss=0.03), Signs(rate=30.0, best=100.0), Signs(queue_s=0.04, least_rtt_s=0.03, utilisation=0.8)],
)
def test_between_the_marks_it_stays_as_it_is(between: Signs) -> None:
    assert not after([(between, 60.0)]).congested
    assert after([(SIGNS["loss"], 2.0), (between, 60.0)]).congested


def test_a_long_round_trip_on_an_idle_link_is_no_congestion() -> None:
    assert not after([(Signs(queue_s=5.0, least_rtt_s=0.03, utilisation=0.1), 60.0)]).congested


def test_what_was_never_measured_is_no_sign() -> None:
    assert not ENTER.reached(Signs())
    assert not STAY.reached(Signs())


maybe = st.one_of(st.none(), st.floats(0, 1e9))


@calm
@given(st.builds(Signs, maybe, maybe, maybe, maybe, maybe, maybe))
def test_what_enters_also_stays(signs: Signs) -> None:
    assert not ENTER.reached(signs) or STAY.reached(signs)
