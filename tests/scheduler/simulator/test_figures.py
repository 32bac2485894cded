"""What a run comes to."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.facts import PrefillCurve
from scheduler.simulator.figures import Figures, Goals, figures
from scheduler.simulator.fleet import Settings
from scheduler.simulator.records import Records
from scheduler.simulator.run import Run
from tests.scheduler.simulator.fleets import fleet, run, traffic

GOALS = Goals(PrefillCurve(0.0, 1e-3), 0.01)


def come_to(first_after: list[float], done_after: list[float], prompts: int = 100, every_s: float = 1.0) -> Figures:
    """Requests every ``every_s`` that had their first token and end so long after they came."""
    count = len(first_after)
    requests = traffic([every_s * n for n in range(count)], [prompts] * count, 11)
    records = Records(count)
    records.first_at = list(requests.arrival_s + np.array(first_after))
    records.done_at = list(requests.arrival_s + np.array(done_after))
    return figures(Run(fleet(), Settings(0), requests, records, float(requests.arrival_s[-1]), 0), GOALS)


def test_percentiles_are_of_what_came_after_the_first_fifth() -> None:
    found = come_to([100.0] * 20 + [1.0] * 70 + [5.0] * 10, [200.0] * 20 + [2.0] * 80)
    assert (found.ttft_p50_s, found.ttft_max_s) == (1.0, 5.0)
    assert found.requests == 80


def test_who_never_had_a_token_waited_for_ever() -> None:
    found = come_to([1.0] * 99 + [float("nan")], [1.1] * 99 + [float("nan")])
    assert found.ttft_max_s == float("inf")
    assert found.ttft_p50_s == 1.0
    assert found.slo_attainment == pytest.approx(1 - 1 / found.requests)


def test_an_objective_needs_both_the_first_token_and_the_pace() -> None:
    # TTFT may be 2.3 s, and ten tokens may follow in 0.105 s
    kept, late, slow = ([2.2, 2.3], [2.4, 2.5], [2.2, 2.31])
    assert come_to([kept[0]] * 50, [kept[1]] * 50).slo_attainment == 1.0
    assert come_to([late[0]] * 50, [late[1]] * 50).slo_attainment == 0.0
    assert come_to([slow[0]] * 50, [slow[1]] * 50).slo_attainment == 0.0


def test_a_steady_run_is_steady_and_one_that_piles_up_is_not() -> None:
    steady = come_to([1.0] * 2000, [2.0] * 2000)
    assert steady.steady
    assert steady.outstanding_slope == pytest.approx(0.0, abs=1e-3)
    piling = come_to([0.2 * n for n in range(2000)], [0.2 * n + 1 for n in range(2000)])
    assert not piling.steady
    assert piling.outstanding_slope == pytest.approx(1 / 6, rel=0.05)
    assert piling.throughput_req_s < 0.9 * piling.offered_req_s


def test_a_run_that_finishes_only_what_is_short_is_not_steady() -> None:
    requests = traffic([float(n) for n in range(2000)], [100, 200] * 1000, 11)
    records = Records(2000)
    for n in range(0, 2000, 2):
        records.first_at[n], records.done_at[n] = n + 1.0, n + 2.0
    found = figures(Run(fleet(), Settings(0), requests, records, 2000.0, 0), GOALS)
    assert not found.steady


def test_shares_and_bytes_are_of_the_same_requests() -> None:
    requests = traffic([float(n) for n in range(100)], [500, 2000] * 50)
    found = figures(run(fleet(remote=2), requests, threshold=1000), GOALS)
    assert found.offloaded_share == 0.5
    assert found.egress_gbps == pytest.approx(2e6 * 8 / 1e9 / 2, rel=0.03)
