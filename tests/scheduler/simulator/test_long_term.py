"""The controller in the simulator: told what happens, obeyed, and as quick as the traffic asks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.controller.actions import Action, Convert, SetThreshold
from scheduler.controller.observation import Observation, Stage
from scheduler.simulator.fleet import Settings
from scheduler.simulator.long_term import LongTerm
from scheduler.simulator.presets import hybrid
from scheduler.simulator.run import simulate
from scheduler.simulator.traffic import Traffic
from tests.bench.distribution_shift import AS_IT_WAS, PHASE_S, SHIFTS, InForce, regained, simulated, traffic


class Scripted:
    """Keeps what it is told and gives the orders of a script, by time."""

    def __init__(self, orders: dict[float, Sequence[Action]]) -> None:
        self._orders = orders
        self.told: list[tuple[float, Observation]] = []

    def step(self, seen: Observation, now: float) -> Sequence[Action]:
        self.told.append((now, seen))
        return self._orders.get(now, ())


def steady(count: int, gap_s: float, prompt: int, output: int) -> Traffic:
    return Traffic(np.arange(count) * gap_s, np.full(count, prompt), np.full(count, output))


def test_every_token_and_every_end_is_told_once_and_by_when_it_began() -> None:
    requests = steady(40, 2.0, 1001, 500)
    fleet, script = hybrid(3), Scripted({})
    run = simulate(fleet, Settings(10_000), InForce(), requests, LongTerm(script, fleet, requests))
    last = script.told[-1][0]
    done = sum(at <= last for at in run.records.done_at)
    assert sum(seen.ends for _, seen in script.told) == done > 20
    spoken = sum(seen.tokens for _, seen in script.told)
    assert done * 500 <= spoken <= 40 * 500
    assert sum(len(seen.lengths) for _, seen in script.told) == 40
    assert {length for _, seen in script.told for length in seen.lengths} == {1000}
    assert all(part.begun <= now for now, seen in script.told for part in seen.spoken)


def test_orders_are_carried_out_and_the_node_is_seen_on_its_way() -> None:
    requests = steady(100, 1.0, 1001, 100)
    fleet = hybrid(3)
    script = Scripted({20.0: (SetThreshold(5.0, "why"), Convert("h20-0", Stage.DECODE, 1, "why", 1))})
    run = simulate(fleet, Settings(10_000), InForce(), requests, LongTerm(script, fleet, requests))
    seen = {now: {node.node_id: node for node in told.nodes}["h20-0"] for now, told in script.told}
    assert (seen[20.0].stage, seen[20.0].becoming) == (Stage.PREFILL, None)
    assert (seen[30.0].stage, seen[30.0].becoming) == (Stage.PREFILL, Stage.DECODE)
    assert seen[30.0].goal is Stage.DECODE
    assert seen[70.0].stage is Stage.DECODE
    assert [one.node for one in run.records.conversions] == ["h20-0"]
    assert script.told[2][1].threshold == 5.0
    assert sum(run.records.remote) == 80


def test_the_split_follows_every_shift_within_450_seconds_and_nobody_is_lost() -> None:
    phases = SHIFTS["inputs x3, then outputs instead, then back"]
    run, _ = simulated(traffic(phases, PHASE_S, seed=0))
    took = regained(run, phases)
    assert took[0] == 0.0
    assert all(seconds is not None and seconds <= 450.0 for seconds in took), took
    assert not np.isnan(run.records.done_at).any()


def test_traffic_that_stands_still_moves_nobody() -> None:
    run, controller = simulated(traffic((AS_IT_WAS,), 3600.0, seed=1))
    assert run.records.conversions == []
    assert controller.assessment is not None
    assert abs(controller.assessment.output_tokens / 1024 - 1) < 0.05
