"""Between which rates a path lies: only a sender that was kept waiting, for long enough, says how slow the path is."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.transport.delivery import KEEP_S, Counts, Delivery, DeliveryWatch
from kvcache.transport.link import tcp_info
from tests.calm import calm

RTT_S = 0.03
TICK_S = 0.25
MANY = 100 << 20


def watched(rates: list[float], **more: float) -> tuple[DeliveryWatch, float]:
    """A watch that saw these rates for a quarter of a second each, and the time; ``waiting`` is a share of it.

    Nothing is outstanding unless ``more`` says so: it replaces the other counts.
    """
    waiting = more.pop("waiting", 0.0)
    fixed = replace(Counts(0, rtt_s=RTT_S, least_rtt_s=RTT_S), **more)
    watch, now, delivered, waited = DeliveryWatch(0.0), 0.0, 0.0, 0.0
    for rate in rates:
        now, delivered, waited = now + TICK_S, delivered + rate * TICK_S, waited + waiting * TICK_S
        watch.look(now, replace(fixed, delivered=int(delivered), busy_s=now, waited_s=waited))
    return watch, now


@pytest.mark.parametrize("held", [{"waiting": 1.0}, {"outstanding": MANY}])
def test_a_link_cut_to_a_twentieth_shows_within_a_second(held: dict[str, float]) -> None:
    watch, now = watched([125e6] * 4 + [6.25e6] * 3, **held)
    told = watch.told(now)
    assert (told.at_least, told.at_most) == (pytest.approx(6.25e6), pytest.approx(6.25e6))


def test_a_limit_that_was_exceeded_since_is_none() -> None:
    watch = DeliveryWatch(0.0)
    for now, low, high in [(1.0, 5.0, 5.0), (1.1, 4.0, 0.0)]:
        watch.saw(now, low, high)
    assert watch.told(1.1) == Delivery(5.0, 5.0)
    watch.saw(1.2, 40.0, 0.0)
    assert watch.told(1.2) == Delivery(40.0, 0.0)


def test_what_arrives_at_once_after_a_loss_is_spread_over_the_windows_in_which_it_was_missing() -> None:
    watch, now = watched([6e6] * 4 + [1e6, 11e6, 6e6], waiting=1.0)
    assert watch.told(now).at_most == pytest.approx(6e6)


def test_what_comes_in_bursts_shows_the_rate_while_there_was_something_on_its_way() -> None:
    watch = DeliveryWatch(0.0)
    for n in range(1, 5):  # 6 MB in 60 ms, four times a second
        watch.look(n * TICK_S, Counts(n * 6_000_000, busy_s=n * 0.06, rtt_s=RTT_S, least_rtt_s=RTT_S))
    assert watch.told(1.0) == Delivery(at_least=pytest.approx(100e6))
    watch.look(1.25, Counts(24_001_000, busy_s=0.24, rtt_s=RTT_S, least_rtt_s=RTT_S))
    assert watch.told(1.25).at_least == pytest.approx(100e6)


@pytest.mark.parametrize("held", [{"waiting": 0.5}, {"outstanding": 1_000_000}])
def test_a_sender_that_has_too_little_to_send_only_shows_what_the_path_can_do(held: dict[str, float]) -> None:
    watch, now = watched([5e6] * 8, **held)
    assert watch.told(now) == Delivery(at_least=pytest.approx(5e6), at_most=0.0)


def test_a_window_that_still_grows_says_nothing_of_the_most() -> None:
    for rtt_s, known in ((0.03, 1), (0.1, 4)):
        held = {"waiting": 1.0, "rtt_s": rtt_s, "least_rtt_s": rtt_s}
        watch, now = watched([1e6] * known, **held)
        assert watch.told(now).at_most == 0.0
        watch, now = watched([1e6] * (known + 1), **held)
        assert watch.told(now).at_most == pytest.approx(1e6)


def test_a_way_that_visibly_queues_is_the_limit_at_once() -> None:
    watch, now = watched([6e6] * 2, outstanding=MANY, rtt_s=0.5)
    assert watch.told(now).at_most == pytest.approx(6e6)


def test_a_burst_that_is_over_within_a_window_is_no_limit_however_much_was_on_its_way_before() -> None:
    watch, now = watched([400e3] * 8, outstanding=120_000, rtt_s=0.5)
    assert watch.told(now).at_most == 0.0


def test_a_trickle_is_no_limit_however_slow_its_round_trips() -> None:
    watch, now = watched([80.0] * 8, outstanding=20, rtt_s=0.5)
    assert watch.told(now) == Delivery()


def test_what_the_pace_holds_back_says_nothing_of_the_path() -> None:
    watch, now = watched([9e6] * 8, waiting=1.0, pace=10e6)
    assert watch.told(now).at_most == 0.0
    watch, now = watched([2e6] * 8, waiting=1.0, pace=10e6)
    assert watch.told(now).at_most == pytest.approx(2e6)


def test_a_path_on_which_nothing_arrives_stalls_and_comes_back() -> None:
    watch, now = watched([1e6] * 4 + [0.0] * 8, outstanding=MANY)
    told = watch.told(now)
    assert (told.stalled_s, told.at_least) == (pytest.approx(2.0), 0.0)
    watch, now = watched([1e6] * 4 + [0.0] * 8 + [1e6], outstanding=MANY)
    assert watch.told(now).stalled_s == 0.0
    watch, now = watched([1e6] * 4 + [0.0] * 8)
    assert watch.told(now).stalled_s == 0.0, "nothing is on its way"


def test_what_was_seen_is_told_for_a_little_longer_than_a_heartbeat() -> None:
    watch = DeliveryWatch(0.0)
    watch.saw(1.0, 5.0, 6.0)
    assert watch.told(1.0 + KEEP_S) == Delivery(5.0, 6.0)
    assert watch.told(1.01 + KEEP_S) == Delivery()


def test_two_looks_at_once_are_one() -> None:
    watch = DeliveryWatch(0.0)
    for now, delivered in [(1.0, 100_000), (1.0, 900_000), (1.05, 900_000)]:
        watch.look(now, Counts(delivered, busy_s=now))
    assert watch.told(1.05).at_least == 100_000
    watch.look(2.0, Counts(900_000, busy_s=2.0))
    assert watch.told(2.0).at_least == 800_000


@calm
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 10**12), st.integers(0, 10**12), st.floats(0, 2), st.floats(0, 1)),
        max_size=30,
    )
)
def test_whatever_is_counted_the_rates_are_those_of_some_windows(
    looks: list[tuple[float, int, int, float, float]],
) -> None:
    watch, now, delivered, waited, best = DeliveryWatch(0.0), 0.0, 0, 0.0, 0.0
    for took, count, outstanding, wait, rtt_s in looks:
        now, delivered, waited = now + took, delivered + count, waited + wait
        watch.look(now, Counts(delivered, outstanding, now, waited, rtt_s, RTT_S))
        best = max(best, delivered / 0.02)
        told = watch.told(now)
        assert 0 <= told.at_least <= best
        assert 0 <= told.at_most <= best
        assert not told.at_most or told.at_least <= told.at_most
        assert told.stalled_s >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="the counts are the kernel's, on Linux alone")
def test_the_kernel_tells_what_has_arrived_and_what_is_on_its_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.sendall(bytes(1000))
            receiver.recv(1000, socket.MSG_WAITALL)
            time.sleep(0.1)
            info = tcp_info(sender)
            assert info is not None
            assert (info.delivered_bytes, info.outstanding_bytes, info.resent_bytes) == (1001, 0, 0)  # and the SYN
            assert info.busy_s < 0.1
            sender.setblocking(False)
            sent = sender.send(bytes(64 << 20))
            time.sleep(0.1)
            info = tcp_info(sender)
            assert info is not None
            assert info.outstanding_bytes > 0
            assert info.busy_s > 0.09
            assert info.delivered_bytes + info.outstanding_bytes == pytest.approx(1000 + sent, abs=64 << 10)
