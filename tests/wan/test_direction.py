"""One direction of the link, on a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from tests.wan.direction import Direction, LinkSettings

PACKET = bytes(1250)
ONE_MS = LinkSettings(rate_bps=10e6, delay_s=0.010, queue_bytes=10 * len(PACKET))
"""A line on which a packet takes a millisecond."""


def through(direction: Direction, packets: int, until: float) -> list[float]:
    """When each of ``packets``, all there at time 0, comes out; looking every tenth of a millisecond."""
    direction.offer([PACKET] * packets, 0.0, 0.0)
    return [step / 10_000 for step in range(int(until * 10_000)) for _ in direction.due(step / 10_000)]


def test_packets_come_out_at_the_line_rate_and_a_delay_later() -> None:
    found = through(Direction(ONE_MS, 1), 5, 0.1)
    assert found == pytest.approx([0.011, 0.012, 0.013, 0.014, 0.015], abs=2e-4)


def test_looking_seldom_does_not_slow_the_line() -> None:
    direction = Direction(ONE_MS, 1)
    arrived = 0
    for step in range(100):  # every 5 ms, five packets: exactly what the line can carry
        direction.offer([PACKET] * 5, step * 0.005, (step + 1) * 0.005)
        arrived += len(direction.due((step + 1) * 0.005))
    assert arrived >= 500 - 5 - 10
    assert direction.counters.overflowed == 0


def test_an_idle_line_saves_nothing_up() -> None:
    direction = Direction(ONE_MS, 1)
    direction.offer([PACKET] * 5, 10.0, 10.0)
    assert direction.due(10.0105) == []
    assert len(direction.due(10.0125)) == 2


def test_what_does_not_fit_the_queue_is_dropped() -> None:
    direction = Direction(ONE_MS, 1)
    assert len(through(direction, 25, 0.1)) == 10
    assert direction.counters.overflowed == 15


def test_a_stopped_line_carries_on_with_what_its_queue_holds() -> None:
    direction = Direction(ONE_MS, 1)
    direction.change(LinkSettings(rate_bps=0, delay_s=0.010, queue_bytes=ONE_MS.queue_bytes), 0.0)
    direction.offer([PACKET] * 12, 0.0, 0.0)
    assert direction.due(5.0) == []
    direction.change(ONE_MS, 5.0)
    assert direction.due(5.0105) == []
    assert len(direction.due(5.1)) == 10
    assert direction.counters.overflowed == 2


def test_losses_follow_from_the_seed_and_have_the_rate_asked_for() -> None:
    lossy = LinkSettings(rate_bps=1e12, delay_s=0.0, loss=0.02, queue_bytes=1 << 30)

    def lost(seed: int) -> list[int]:
        direction = Direction(lossy, seed)
        found = []
        for _ in range(100):
            direction.offer([PACKET] * 100, 0.0, 1.0)
            found.append(direction.counters.lost)
        return found

    assert lost(1) == lost(1) != lost(2)
    assert abs(lost(1)[-1] - 200) < 4 * math.sqrt(10_000 * 0.02 * 0.98)


@pytest.mark.parametrize("wrong", [{"loss": 1.5}, {"rate_bps": -1.0}, {"delay_s": -0.1}, {"queue_bytes": 0}])
def test_settings_that_no_link_has_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LinkSettings(**wrong)
