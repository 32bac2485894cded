"""Observed time to first token over the predicted one."""

from __future__ import annotations

from math import inf, nan

import pytest

from scheduler.accuracy import HALF_LIFE_S, LEAST, MOST, TtftRatio


def after(predicted_s: float, observed_s: float, times: int = 50) -> TtftRatio:
    ratio = TtftRatio()
    for _ in range(times):
        ratio.observe(predicted_s, observed_s, 0.0)
    return ratio


def test_a_cluster_of_which_nothing_was_seen_is_taken_at_its_word() -> None:
    assert TtftRatio().value(0.0) == 1.0


def test_a_cluster_that_takes_twice_as_long_as_predicted_is_predicted_so() -> None:
    assert after(2.0, 4.0).value(0.0) == pytest.approx(2.0, rel=0.01)
    assert after(2.0, 4.0, times=1).value(0.0) == pytest.approx(2.0**0.2)


def test_no_single_observation_and_no_series_of_them_goes_beyond_the_bounds() -> None:
    assert after(1.0, 1e9, times=1).value(0.0) == pytest.approx(MOST**0.2)
    assert after(1.0, 1e9).value(0.0) <= MOST
    assert after(1e9, 1.0).value(0.0) >= LEAST


def test_short_predictions_teach_little() -> None:
    assert after(0.005, 0.05, times=1).value(0.0) < 1.01


def test_without_news_it_goes_back_so_that_the_cluster_is_tried_again() -> None:
    ratio = after(2.0, 8.0)
    assert ratio.value(HALF_LIFE_S) == pytest.approx(2.0, rel=0.02)
    assert ratio.value(20 * HALF_LIFE_S) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, nan, inf])
def test_nonsense_teaches_nothing(nonsense: float) -> None:
    assert after(nonsense, 1.0).value(0.0) == 1.0
    assert after(1.0, nonsense).value(0.0) == 1.0
