"""Between which rates a path lies: only a sender that was kept waiting, for long enough, says how slow the path is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.transport.delivery import KEEP_S, Delivery, DeliveryWatch
from tests.calm import calm

RTT_S = 0.03
TICK_S = 0.25


def watched(
    rates: list[float], waiting: float = 1.0, pace: float = 0.0, rtt_s: float = RTT_S
) -> tuple[DeliveryWatch, float]:
    """A watch that saw these rates for a quarter of a second each, and the time; connections waited for that share."""
    watch, now, acked, waited = DeliveryWatch(0.0), 0.0, 0.0, 0.0
    for rate in rates:
        now, acked, waited = now + TICK_S, acked + rate * TICK_S, waited + waiting * TICK_S
        watch.look(now, int(acked), waited, rtt_s, pace)
    return watch, now


def test_a_link_cut_to_a_twentieth_shows_within_a_second() -> None:
    watch, now = watched([125e6] * 4 + [6.25e6] * 2)
    told = watch.told(now)
    assert (told.at_least, told.at_most) == (pytest.approx(6.25e6), pytest.approx(6.25e6))


def test_a_limit_that_was_exceeded_since_is_none() -> None:
    watch = DeliveryWatch(0.0)
    for now, low, high in [(1.0, 5.0, 5.0), (1.1, 4.0, 0.0)]:
        watch.saw(now, low, high)
    assert watch.told(1.1) == Delivery(5.0, 5.0)
    watch.saw(1.2, 40.0, 0.0)
    assert watch.told(1.2) == Delivery(40.0, 0.0)


def test_a_sender_that_has_too_little_to_send_only_shows_what_the_path_can_do() -> None:
    watch, now = watched([5e6] * 8, waiting=0.5)
    assert watch.told(now) == Delivery(at_least=pytest.approx(5e6), at_most=0.0)


def test_a_window_that_still_grows_says_nothing_of_the_most() -> None:
    for rtt_s, known in ((0.03, 1), (0.1, 4)):
        watch, now = watched([1e6] * known, rtt_s=rtt_s)
        assert watch.told(now).at_most == 0.0
        watch, now = watched([1e6] * (known + 1), rtt_s=rtt_s)
        assert watch.told(now).at_most == pytest.approx(1e6)


def test_what_the_pace_holds_back_says_nothing_of_the_path() -> None:
    watch, now = watched([9e6] * 8, pace=10e6)
    assert watch.told(now).at_most == 0.0
    watch, now = watched([2e6] * 8, pace=10e6)
    assert watch.told(now).at_most == pytest.approx(2e6)


def test_a_path_on_which_nothing_is_acknowledged_stalls_and_comes_back() -> None:
    watch, now = watched([1e6] * 4 + [0.0] * 8)
    told = watch.told(now)
    assert (told.stalled_s, told.at_least) == (pytest.approx(2.0), 0.0)
    watch, now = watched([1e6] * 4 + [0.0] * 8 + [1e6])
    assert watch.told(now).stalled_s == 0.0


def test_what_was_seen_is_told_for_a_little_longer_than_a_heartbeat() -> None:
    watch = DeliveryWatch(0.0)
    watch.saw(1.0, 5.0, 6.0)
    assert watch.told(1.0 + KEEP_S) == Delivery(5.0, 6.0)
    assert watch.told(1.01 + KEEP_S) == Delivery()


def test_two_looks_at_once_are_one() -> None:
    watch = DeliveryWatch(0.0)
    watch.look(1.0, 1000, 0.0, RTT_S, 0.0)
    watch.look(1.0, 9000, 0.0, RTT_S, 0.0)
    watch.look(1.05, 9000, 0.0, RTT_S, 0.0)
    assert watch.told(1.05).at_least == 1000
    watch.look(2.0, 9000, 0.0, RTT_S, 0.0)
    assert watch.told(2.0).at_least == 8000


@calm
@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 10**12), st.floats(0, 2)), max_size=30))
def test_whatever_is_counted_the_rates_are_those_of_some_window(looks: list[tuple[float, int, float]]) -> None:
    watch, now, acked, waited = DeliveryWatch(0.0), 0.0, 0, 0.0
    best = 0.0
    for took, count, wait in looks:
        now, acked, waited = now + took, acked + count, waited + wait
        watch.look(now, acked, waited, RTT_S, 0.0)
        best = max(best, acked / 0.1)
        told = watch.told(now)
        assert 0 <= told.at_most <= max(told.at_least, told.at_most) <= best
        assert told.stalled_s >= 0
