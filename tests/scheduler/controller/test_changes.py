"""A change is found soon, where it was, and only where there was one."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.controller.changes import mean_changed_at, rate_changed_at


def steps(values: list[np.ndarray]) -> tuple[list[float], list[float], list[float]]:
    return [len(v) for v in values], [v.sum() for v in values], [(v**2).sum() for v in values]


def test_a_shift_of_the_mean_is_found_within_forty_samples_and_placed_where_it_was() -> None:
    source = np.random.default_rng(5)
    values = [source.normal(9.9, 1.0, 20) for _ in range(50)] + [source.normal(11.0, 1.0, 20) for _ in range(2)]
    found = mean_changed_at(*steps(values))
    assert found in (49, 50, 51)


@pytest.mark.parametrize("seed", range(5))
def test_a_mean_that_stands_still_has_not_changed(seed: int) -> None:
    source = np.random.default_rng(seed)
    assert mean_changed_at(*steps([source.normal(0.0, 1.0, 30) for _ in range(130)])) is None


def test_ends_that_do_not_come_show_a_longer_output_before_any_has_ended() -> None:
    ends, tokens = [29.0] * 60 + [0.0] * 2, [29_700.0] * 62
    assert rate_changed_at(ends, tokens) == 60
    assert rate_changed_at([29.0] * 62, tokens) is None


def test_two_steps_are_too_few_to_compare_with_nothing() -> None:
    assert mean_changed_at([5.0], [1.0], [1.0]) is None
    assert rate_changed_at([5.0], [1.0]) is None
    assert rate_changed_at([0.0, 0.0], [0.0, 10.0]) is None
