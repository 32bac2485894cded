"""Planned conversions and mixed chunks against the published case study's fractional bound."""

from __future__ import annotations

import pytest

from scheduler.case_study import LENGTHS, homogeneous, hybrid
from scheduler.controller.fractional import mixed_chunks, time_share
from scheduler.split_search import SplitSearch
from scheduler.throughput import Reading

BOUND = SplitSearch(hybrid(100), LENGTHS, Reading.MEAN_SERVICE).fractional().lambda_max


def test_time_sharing_lies_between_the_best_whole_split_and_the_bound() -> None:
    plan = time_share(hybrid(100), LENGTHS, 30.0, 10.0)
    assert plan is not None
    assert (plan.first.prefill, plan.second.prefill) == ((3,), (4,))
    assert 3.25 < plan.lambda_max < BOUND
    assert plan.wait_s <= 10.0 + 1e-6
    quick = time_share(hybrid(100), LENGTHS, 10.0, 10.0)
    assert quick is not None
    assert plan.lambda_max < quick.lambda_max < BOUND


def test_both_stages_serve_what_the_plan_promises_over_a_period() -> None:
    plan = time_share(hybrid(100), LENGTHS, 30.0, 10.0)
    assert plan is not None
    away = 2 * plan.conversion_s
    prefill = plan.first.prefill_limit * (plan.first_s + away) + plan.second.prefill_limit * plan.second_s
    decode = plan.first.theta_pdd * plan.first_s + plan.second.theta_pdd * (plan.second_s + away)
    assert prefill / plan.period_s == pytest.approx(plan.lambda_max)
    assert decode / plan.period_s == pytest.approx(plan.lambda_max)


def test_a_conversion_that_takes_longer_than_waiting_allows_is_not_planned() -> None:
    assert time_share(hybrid(100), LENGTHS, 1800.0, 1.0) is None
    with pytest.raises(ValueError, match="must be positive"):
        time_share(hybrid(100), LENGTHS, 0.0, 1.0)


def test_mixed_chunks_reach_the_bound_where_the_budget_allows_it_and_keep_the_budget() -> None:
    plan = mixed_chunks(hybrid(100), LENGTHS, 0.030)
    assert plan.lambda_max == pytest.approx(BOUND, rel=1e-3)
    assert plan.prefill == (3,)
    assert 0.028 < plan.tpot_s[0] <= 0.030
    assert plan.chunk_tokens[0] > 0
    tight = mixed_chunks(hybrid(100), LENGTHS, 0.026)
    assert tight.tpot_s[0] <= 0.026 + 1e-12
    assert 3.22 < tight.lambda_max < plan.lambda_max
    none = mixed_chunks(hybrid(100), LENGTHS, 0.025)
    assert none.share == (0.0,)


def test_a_budget_below_a_decode_step_is_refused() -> None:
    with pytest.raises(ValueError, match="tpot_s"):
        mixed_chunks(homogeneous(), LENGTHS, 0.02)
