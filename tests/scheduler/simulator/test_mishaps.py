"""Nodes that are lost, links that change, ways that come too late: every request is answered, or counted as failed."""

from __future__ import annotations

from math import isnan

import pytest

from scheduler.case_study import LENGTHS
from scheduler.simulator.arrivals import Arrivals, synthetic
from scheduler.simulator.fleet import Failure, LinkChange, LinkSpec, Settings
from scheduler.simulator.presets import hybrid
from scheduler.simulator.run import simulate
from tests.scheduler.simulator.fleets import RAW, fleet, run, traffic


def test_what_a_lost_prefill_node_had_is_tried_again_at_home() -> None:
    settings = Settings(0, failures=(Failure(0.5, "far-0"),))
    found = run(fleet(remote=1), traffic([0.0], [2000]), threshold=1000, settings=settings).records
    assert found.first_at == [pytest.approx(2.51)]
    assert (found.fell_back, found.failed) == (1, 0)


def test_what_streamed_from_a_lost_decode_node_is_broken_off_and_counted() -> None:
    settings = Settings(0, failures=(Failure(1.0, "m-1"),))
    found = run(fleet(decode=2), traffic([0.0, 0.95], [500, 500], 1000), settings=settings).records
    assert found.failed == 1
    assert isnan(found.done_at[0])
    assert not isnan(found.done_at[1])


def test_a_lost_node_that_is_back_takes_work_again() -> None:
    settings = Settings(0, failures=(Failure(0.5, "m-0", 3.0),))
    found = run(fleet(prefill=1, decode=1), traffic([4.0], [500]), settings=settings).records
    assert found.first_at == [pytest.approx(4.51)]


def test_a_way_that_is_late_is_tried_again_at_home_within_the_budget() -> None:
    settings = Settings(0, late_fallback=True, links=(LinkChange(0.1, "far", 1000.0),))
    where = fleet(remote=1, link=LinkSpec(1e7))
    found = run(where, traffic([0.0], [2000]), threshold=1000, settings=settings).records
    # predicted 1 s: late after 3 s, and prefilled at home in 2 s
    assert found.first_at == [pytest.approx(5.01, abs=0.05)]
    assert found.fell_back == 1


def test_the_estimator_hears_of_a_cut_and_of_its_end() -> None:
    requests = traffic([0.5 * n for n in range(400)], [2000] * 400)
    settings = Settings(1000, links=(LinkChange(60.0, "far", 1e5), LinkChange(120.0, "far", 1e8)))
    found = simulate(fleet(remote=2, prefill=3, link=LinkSpec(1e8)), settings, RAW, requests).records
    away = [sum(found.remote[at * 20 : at * 20 + 20]) for at in range(20)]
    assert min(away[:6]) > 10
    assert max(away[7:12]) <= 2
    assert min(away[13:18]) > 10


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_track_of_whatever_fails(seed: int) -> None:
    requests = synthetic(Arrivals(1200, 2.5, cv=2.0), LENGTHS, 300, seed)
    settings = Settings(
        19_400,
        late_fallback=True,
        links=(LinkChange(100.0, "remote", 1e8), LinkChange(250.0, "remote", 1.25e10)),
        failures=(
            Failure(50.0, "remote-1", 200.0),
            Failure(90.0, "h20-4", 150.0),
            Failure(120.0, "h20-0", 300.0),
            Failure(130.0, "remote-2"),
        ),
    )
    found = simulate(hybrid(3), settings, RAW, requests).records
    answered = sum(not isnan(at) for at in found.done_at)
    assert answered + found.failed == 1200
    assert found.failed < 100
    assert found.fell_back > 0


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (Settings(0, failures=(Failure(1.0, "x"),)), "no such node"),
        (Settings(0, links=(LinkChange(1.0, "x", 1.0),)), "no such cluster"),
    ],
)
def test_what_is_not_there_cannot_fail(settings: Settings, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        run(fleet(), traffic([0.0], [100]), settings=settings)
