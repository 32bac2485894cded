"""Simulated time."""

from __future__ import annotations

from scheduler.simulator.clock import Clock


class Notes:
    def __init__(self, clock: Clock, seen: list[tuple[float, str]], name: str) -> None:
        self.clock, self.seen, self.name = clock, seen, name

    def fire(self, now: float) -> None:
        assert now == self.clock.now
        self.seen.append((now, self.name))


def clock_with(*events: tuple[float, str]) -> tuple[Clock, list[tuple[float, str]]]:
    clock, seen = Clock(), []
    for when, name in events:
        clock.at(when, Notes(clock, seen, name))
    return clock, seen


def test_events_fire_in_time_and_those_of_one_moment_as_they_were_scheduled() -> None:
    clock, seen = clock_with((2.0, "c"), (1.0, "b"), (1.0, "a"))
    assert not clock.run()
    assert seen == [(1.0, "b"), (1.0, "a"), (2.0, "c")]


def test_a_run_stops_before_what_is_due_later_and_after_so_many_events() -> None:
    clock, seen = clock_with((1.0, "a"), (2.0, "b"), (3.0, "c"))
    assert clock.run(most=1)
    assert not clock.run(until=2.5)
    assert [name for _, name in seen] == ["a", "b"]
    assert clock.fired == 2
