"""Policies by name, and what the case study's come to."""

from __future__ import annotations

import json

import pytest

from scheduler.case_study import LENGTHS
from scheduler.simulator.arrivals import Arrivals, synthetic
from scheduler.simulator.figures import Figures, figures
from scheduler.simulator.orders import Order, Ordering
from scheduler.simulator.presets import GOALS, homogeneous, hybrid
from scheduler.simulator.records import Spans
from scheduler.simulator.requests_table import COLUMNS, rows
from scheduler.simulator.run import simulate
from scheduler.simulator.study import Choice, Name, Plan, plan
from scheduler.simulator.time_share import TimeShare
from scheduler.simulator.timeline import timeline
from scheduler.values import PolicyValues

VALUES = PolicyValues(remote_codec="raw")


def made(choice: Choice) -> Plan:
    return plan(choice, hybrid(0), homogeneous(0), LENGTHS, 1024, GOALS, VALUES)


def outcome(choice: Choice, rate: float, requests: int = 3000) -> Figures:
    what = made(choice)
    traffic = synthetic(Arrivals(requests, rate, stratified=True), LENGTHS, 1024, seed=1)
    return figures(simulate(what.fleet, what.settings, what.policy, traffic, what.controller), what.goals)


def test_whatever_is_not_given_is_the_models_best() -> None:
    ours = made(Choice(Name.PRFAAS))
    assert (ours.fleet.local[0].prefill, ours.settings.threshold_tokens) == (3, pytest.approx(19_476, abs=20))
    assert made(Choice(Name.HOMOGENEOUS)).fleet.local[0].prefill == 9
    assert made(Choice(Name.NAIVE)).fleet.local[0].prefill == 0
    assert made(Choice(Name.LOCAL)).fleet.local[0].prefill == 6
    assert made(Choice(Name.PRFAAS, prefill=4)).settings.threshold_tokens > 20_000


def test_fractional_roles_swing_between_the_splits_around_the_best_or_mix() -> None:
    swings = made(Choice(Name.PRFAAS, fractional=True))
    assert swings.controller == TimeShare(3, 4)
    assert swings.settings.threshold_tokens == pytest.approx(21_804, abs=20)
    mixes = made(Choice(Name.PRFAAS, fractional=True, tpot_budget=0.05))
    assert mixes.controller is None
    assert mixes.settings.chunk_s == pytest.approx(0.05 * 0.025)
    assert mixes.fleet.local[0].prefill == 3


def test_a_split_that_leaves_nobody_to_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="decode"):
        made(Choice(Name.PRFAAS, prefill=8))


@pytest.mark.parametrize("order", list(Order))
def test_ours_answers_sooner_than_the_baseline_of_equal_cost(order: Order) -> None:
    ordering = Ordering(order)
    ours = outcome(Choice(Name.PRFAAS, ordering=ordering), 1.82)
    theirs = outcome(Choice(Name.HOMOGENEOUS, ordering=ordering), 1.82)
    assert ours.ttft_p90_s <= 0.4 * theirs.ttft_p90_s
    assert ours.slo_attainment > 0.95


def test_close_to_capacity_a_threshold_that_bends_beats_one_that_does_not() -> None:
    ours, fixed = (outcome(Choice(name), 2.9, 6000) for name in (Name.PRFAAS, Name.STATIC))
    assert ours.ttft_p90_s < 0.95 * fixed.ttft_p90_s
    assert ours.ttft_p99_s < fixed.ttft_p99_s


def test_each_baseline_does_what_its_name_says() -> None:
    found = {name: outcome(Choice(name), 1.2, 1500) for name in Name}
    assert found[Name.NAIVE].offloaded_share == 1.0
    assert found[Name.LOCAL].offloaded_share == found[Name.HOMOGENEOUS].offloaded_share == 0.0
    assert found[Name.DISTSERVE].egress_gbps == 0.0
    assert found[Name.STATIC].offloaded_share == pytest.approx(LENGTHS.above(19_476), abs=0.03)
    # both phases on one machine: every token waits for somebody's prompt
    assert found[Name.SPLITWISE].tpot_p90_s > 1.5 * GOALS.tpot_s
    assert all(each.failed == 0 for each in found.values())


def test_a_run_can_be_seen_request_by_request_and_in_a_trace_viewer() -> None:
    what, spans = made(Choice(Name.PRFAAS, fractional=True)), Spans()
    traffic = synthetic(Arrivals(400, 3.3), LENGTHS, 1024, seed=1)
    run = simulate(what.fleet, what.settings, what.policy, traffic, what.controller, spans)
    table = list(rows(run))
    assert len(table) == 400
    assert {len(row) for row in table} == {len(COLUMNS)}
    events = json.loads(json.dumps(timeline(run, spans)))["traceEvents"]
    named = {event["tid"] for event in events if event["ph"] == "M"}
    assert {event["ph"] for event in events} == {"M", "X", "b", "e"}
    assert all(event["tid"] in named and event["dur"] >= 0 for event in events if event["ph"] == "X")
    begun, ended = ([e["id"] for e in events if e["ph"] == phase] for phase in "be")
    assert sorted(begun) == sorted(ended)
    assert len([e for e in events if e.get("cat") == "prefill"]) == 400
