"""The fallback budget: a share of a sliding window, and one fallback whatever it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.budget import BudgetValues, FallbackBudget
from tests.calm import calm


def test_the_first_fallback_of_a_window_is_admitted_whatever_it_costs_and_blocks_the_next() -> None:
    budget = FallbackBudget()
    assert budget.admit(0.0, 1000.0, nodes=1)
    assert not budget.admit(1.0, 0.1, nodes=1)
    assert budget.retry_after_s(1.0) == 29.0
    assert budget.admit(30.0, 0.1, nodes=1)


def test_fallbacks_share_twenty_percent_of_thirty_seconds_of_each_node() -> None:
    budget = FallbackBudget()
    assert [budget.admit(0.0, 2.0, nodes=1) for _ in range(4)] == [True, True, True, False]
    assert budget.admit(0.0, 2.0, nodes=2)


def test_gateways_over_the_same_nodes_have_even_parts_and_get_those_of_one_that_is_gone() -> None:
    gateways = 2
    budgets = [FallbackBudget(sharers=lambda: gateways) for _ in range(2)]
    spent = [[budget.admit(0.0, 1.0, nodes=1) for _ in range(7)].count(True) for budget in budgets]
    assert spent == [3, 3], "together 6 s, as one gateway alone"
    gateways = 1
    assert [budgets[0].admit(1.0, 1.0, nodes=1) for _ in range(4)] == [True, True, True, False]


def test_a_fallback_of_unknown_cost_is_admitted_only_alone() -> None:
    budget = FallbackBudget()
    assert budget.admit(0.0, None, nodes=8)
    assert not budget.admit(0.0, None, nodes=8)


def test_an_empty_window_asks_for_no_patience() -> None:
    assert FallbackBudget().retry_after_s(5.0) == 0.0


@calm
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 10)), max_size=60), st.integers(1, 4), st.floats(0.05, 1.0))
def test_no_window_ever_spends_more_than_its_share_or_one_fallback(
    steps: list[tuple[float, float]], nodes: int, share: float
) -> None:
    budget = FallbackBudget(BudgetValues(share=share, window_s=30.0))
    now, spent = 0.0, []
    for gap, cost in steps:
        now += gap
        if budget.admit(now, cost, nodes):
            spent.append((now, cost))
    for end, _ in spent:
        window = [cost for at, cost in spent if at <= end < at + 30.0]
        assert len(window) == 1 or sum(window) <= max(share * 30.0 * nodes, max(window)) + 1e-9
