"""Synthetic traffic, and what can be done with any."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.case_study import LENGTHS
from scheduler.simulator.arrivals import Arrivals, synthetic
from scheduler.simulator.traffic import Traffic
from tests.scheduler.simulator.fleets import traffic


def test_equal_seeds_draw_equal_requests_and_others_do_not() -> None:
    one, same, other = (synthetic(Arrivals(500, 2.0), LENGTHS, 10, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.arrival_s, same.arrival_s)
    assert np.array_equal(one.prompt_tokens, same.prompt_tokens)
    assert not np.array_equal(one.prompt_tokens, other.prompt_tokens)


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(cv: float) -> None:
    gaps = np.diff(synthetic(Arrivals(40_000, 2.0, cv), LENGTHS, 10, 5).arrival_s)
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_lengths_are_those_of_the_distribution() -> None:
    tokens = synthetic(Arrivals(20_000, 2.0, stratified=True), LENGTHS, 10, 5).prompt_tokens - 1
    assert tokens.mean() == pytest.approx(27_486, rel=0.001)
    assert np.mean(tokens > 19_400) == pytest.approx(LENGTHS.above(19_400), abs=0.0005)
    assert tokens.min() >= 128
    assert tokens.max() <= 131_072


def test_stratified_lengths_vary_less_from_seed_to_seed_and_pin_the_rate() -> None:
    independent, strata = (
        [synthetic(Arrivals(2_000, 2.0, stratified=how), LENGTHS, 10, seed) for seed in range(5)]
        for how in (False, True)
    )
    spread = [np.std([one.prompt_tokens.mean() for one in drawn]) for drawn in (independent, strata)]
    assert spread[1] < spread[0] / 10
    assert [one.arrival_s[-1] for one in strata] == pytest.approx([1000.0] * 5)


def test_faster_traffic_is_the_same_in_less_time() -> None:
    assert list(traffic([0.0, 6.0], [10, 20]).faster(3.0).arrival_s) == [0.0, 2.0]


def test_ticks_are_spread_over_the_time_that_each_stands_for() -> None:
    spread = traffic([0.0, 0.0, 0.0, 3.0, 3.0], [1, 2, 3, 4, 5]).spread(3.0, seed=1)
    assert np.all((spread.arrival_s >= 0) & (spread.arrival_s < 6))
    assert sorted(spread.prompt_tokens[:3]) == [2, 3, 4]
    assert list(np.diff(spread.arrival_s) >= 0) == [True] * 4


def test_what_an_endless_cache_leaves_is_what_no_earlier_prompt_had() -> None:
    requests = traffic([0.0, 1.0, 2.0], [250, 250, 200], 1, ((1, 2, 3), (1, 2, 4), (1, 9)), 100)
    # full blocks only: the third of each is not, and the last prompt shares its first
    assert list(requests.uncached_tokens()) == [250, 50, 100]


@pytest.mark.parametrize(
    ("arrivals", "prompts", "outputs", "what"),
    [
        ([1.0, 0.0], [1, 1], [1, 1], "ascend"),
        ([0.0], [-1], [1], "at least one token"),
        ([0.0], [1], [0], "at least one token"),
        ([], [], [], "at least one"),
    ],
)
def test_traffic_that_cannot_be_is_refused(
    arrivals: list[float], prompts: list[int], outputs: list[int], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        Traffic(np.array(arrivals, float), np.array(prompts, int) + 1, np.array(outputs, int))
