"""Machines that change their role in mid-run."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.case_study import LENGTHS
from scheduler.simulator.arrivals import Arrivals, synthetic
from scheduler.simulator.fleet import Conversion, Role, Settings
from scheduler.simulator.presets import hybrid
from scheduler.simulator.run import simulate
from scheduler.simulator.time_share import TimeShare
from tests.scheduler.simulator.fleets import RAW, fleet, run, traffic


def test_a_prefill_machine_finishes_what_runs_hands_over_what_waits_and_decodes_after_its_conversion() -> None:
    settings = Settings(0, conversion_s=5.0, conversions=(Conversion(1.0, "m-0", Role.DECODE),))
    requests = traffic([0.0, 0.0, 0.0, 20.0], [2000, 2000, 2000, 1000], [1, 1, 1, 1])
    found = run(fleet(prefill=2, decode=1), requests, settings=settings).records
    # the third waited behind the first on m-0, and now waits behind the second on m-1
    assert found.first_at == pytest.approx([2.01, 2.01, 4.01, 21.01])
    (converted,) = found.conversions
    assert (converted.asked_at, converted.drained_at, converted.served_at) == pytest.approx((1.0, 2.0, 7.0))


def test_a_decode_machine_ends_its_streams_first() -> None:
    settings = Settings(0, conversion_s=5.0, conversions=(Conversion(1.5, "m-1", Role.PREFILL),))
    requests = traffic([0.0, 10.0, 10.0], [1000, 1000, 1000], [200, 1, 1])
    found = run(fleet(prefill=1, decode=2), requests, settings=settings).records
    (converted,) = found.conversions
    assert converted.drained_at == pytest.approx(found.done_at[0])
    assert converted.served_at == pytest.approx(found.done_at[0] + 5.0)
    # two machines prefill by then
    assert found.first_at[1:] == pytest.approx([11.01, 11.01])


def test_the_last_decode_machine_stays_one() -> None:
    settings = Settings(0, conversions=(Conversion(1.0, "m-1", Role.PREFILL),))
    assert run(fleet(), traffic([0.0, 5.0], [100, 100]), settings=settings).records.conversions == []


def test_a_conversion_of_a_machine_that_is_not_there_is_refused_by_name() -> None:
    settings = Settings(0, conversions=(Conversion(1.0, "m-9", Role.PREFILL),))
    with pytest.raises(ValueError, match=r"'m-9'.*m-0, m-1"):
        run(fleet(), traffic([0.0], [100]), settings=settings)


def test_sharing_the_roles_over_time_serves_what_neither_whole_split_does() -> None:
    requests = synthetic(Arrivals(6000, 3.3, stratified=True), LENGTHS, 1024, seed=1)

    def backlog(prefill: int, controller: TimeShare | None) -> float:
        found = simulate(hybrid(prefill), Settings(21_800, conversion_s=5.0), RAW, requests, controller).records
        assert not np.isnan(found.done_at).any()
        return float(np.mean(np.array(found.first_at)[-1000:] - requests.arrival_s[-1000:]))

    shared = backlog(4, TimeShare(3, 4))
    assert shared < 0.7 * backlog(3, None)
    assert shared < 0.7 * backlog(4, None)
