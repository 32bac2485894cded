"""Following the best threshold with hysteresis."""

from __future__ import annotations

import pytest

from scheduler.threshold import ThresholdFollower


def test_a_wobble_is_not_followed() -> None:
    follower = ThresholdFollower()
    assert [follower.follow(1000, best) for best in (1050, 930, 1099, 1000)] == [1000] * 4


def test_a_change_is_followed_when_it_is_asked_for_twice_and_not_to_and_fro() -> None:
    follower = ThresholdFollower()
    assert [follower.follow(1000, best) for best in (1200, 1250)] == [1000, 1250]
    assert [follower.follow(1000, best) for best in (1200, 800, 1200, 800)] == [1000] * 4


def test_after_a_quiet_look_the_asking_begins_anew() -> None:
    follower = ThresholdFollower()
    assert [follower.follow(1000, best) for best in (1200, 1000, 1200)] == [1000] * 3


@pytest.mark.parametrize("best", [2000.0, 500.0, 0.0, 1e6])
def test_what_is_off_by_a_factor_is_followed_at_once(best: float) -> None:
    assert ThresholdFollower().follow(1000, best) == round(best)


def test_from_nothing_it_starts() -> None:
    assert ThresholdFollower().follow(0, 700.0) == 700
