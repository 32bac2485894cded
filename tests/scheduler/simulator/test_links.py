"""Flows that share a link: what goes in comes out, and nobody gets more than a fair part of what is short."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from scheduler.simulator.clock import Clock
from scheduler.simulator.flows import Flow
from scheduler.simulator.jobs import Job
from scheduler.simulator.links import Link


class Do:
    def __init__(self, what: object, *args: object) -> None:
        self.what, self.args = what, args

    def fire(self, now: float) -> None:
        self.what(*self.args, now)  # type: ignore[operator]


def linked(rate: float) -> tuple[Clock, Link, dict[int, float]]:
    clock, done = Clock(), {}

    def note(flow: Flow, now: float) -> None:
        done[flow.owner.index] = now

    return clock, Link("far", rate, 0.0, clock, note), done


def send(clock: Clock, link: Link, index: int, at: float, seconds: float, nbytes: float, **more: float) -> None:
    flow = Flow(Job(index, at, 1, 1, ()), at, at + seconds, seconds, nbytes, nbytes, **more)
    clock.at(at, Do(link.open, flow))
    clock.at(at + seconds, Do(link.computed, flow))


def test_on_a_wide_link_a_transfer_ends_with_its_prefill_and_costs_no_events() -> None:
    clock, link, done = linked(1000.0)
    send(clock, link, 0, 0.0, 10.0, 1000.0)
    send(clock, link, 1, 5.0, 10.0, 1000.0)
    clock.run()
    assert done == {0: 10.0, 1: 15.0}
    assert clock.fired == 4


def test_a_narrow_link_takes_bytes_over_rate() -> None:
    clock, link, done = linked(50.0)
    send(clock, link, 0, 0.0, 10.0, 1000.0)
    clock.run()
    assert done == {0: pytest.approx(20.0)}


def test_two_backlogged_flows_get_half_each() -> None:
    clock, link, done = linked(100.0)
    send(clock, link, 0, 0.0, 1.0, 1000.0)
    send(clock, link, 1, 0.0, 1.0, 500.0)
    clock.run()
    assert done == {1: pytest.approx(10.0), 0: pytest.approx(15.0)}


def test_a_flow_that_can_use_less_than_its_part_leaves_the_rest_to_others() -> None:
    clock, link, done = linked(100.0)
    send(clock, link, 0, 0.0, 10.0, 200.0)
    send(clock, link, 1, 0.0, 1.0, 800.0)
    clock.run()
    assert done == {0: pytest.approx(10.0), 1: pytest.approx(10.0)}


def test_a_codec_that_cannot_feed_the_link_sets_the_pace() -> None:
    clock, link, done = linked(1000.0)
    send(clock, link, 0, 0.0, 1.0, 1000.0, cap=100.0)
    clock.run()
    assert done == {0: pytest.approx(10.0)}


def test_a_link_that_slows_down_and_recovers_carries_what_it_can_at_each_rate() -> None:
    clock, link, done = linked(100.0)
    send(clock, link, 0, 0.0, 10.0, 500.0)
    clock.at(4.0, Do(link.becomes, 10.0))
    clock.at(14.0, Do(link.becomes, 100.0))
    clock.run()
    # 200 by 4 s, 100 more by 14 s, the other 200 at 100 a second
    assert done == {0: pytest.approx(16.0)}


def test_a_dead_link_keeps_what_is_on_it_until_it_is_back() -> None:
    clock, link, done = linked(100.0)
    send(clock, link, 0, 0.0, 10.0, 500.0)
    clock.at(5.0, Do(link.becomes, 0.0))
    clock.at(105.0, Do(link.becomes, 100.0))
    clock.run()
    assert done == {0: pytest.approx(107.5)}


@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_conserved_and_the_link_is_never_faster_than_its_rate(seed: int) -> None:
    rng = random.Random(seed)
    clock, link, done = linked(1e9)
    total, seen = 0.0, [(0.0, 0.0)]

    def watch(now: float) -> None:
        seen.append((now, link.carried(now)))

    for index in range(60):
        nbytes = rng.uniform(1e8, 2e10)
        total += nbytes
        send(clock, link, index, rng.uniform(0.0, 100.0), rng.uniform(0.5, 20.0), nbytes)
    for at in range(1, 2000):
        clock.at(at / 2, Do(watch))
    clock.run()
    assert len(done) == 60
    assert link.carried(clock.now) == pytest.approx(total)
    assert max((b - a) / (t - s) for (s, a), (t, b) in pairwise(seen)) <= 1e9 * (1 + 1e-6)
    # a single server that is never idle while there is a backlog: all is gone when the last byte could be
    assert max(done.values()) >= total / 1e9


def test_a_transfer_that_is_given_up_leaves_its_part_to_the_others() -> None:
    clock, link, done = linked(100.0)
    flow = Flow(Job(9, 0.0, 1, 1, ()), 0.0, 1.0, 1.0, 1000.0, 1000.0)
    clock.at(0.0, Do(link.open, flow))
    send(clock, link, 1, 0.0, 1.0, 500.0)
    clock.at(2.0, Do(link.close, flow))
    clock.run()
    assert done == {1: pytest.approx(6.0)}
    assert link.carried(clock.now) == pytest.approx(600.0)
