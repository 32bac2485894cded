"""Release curves."""

from __future__ import annotations

import pytest

from scheduler.simulator.flows import Flow
from scheduler.simulator.jobs import Job

JOB = Job(0, 0.0, 1, 1, ())


def test_the_last_chunk_lets_go_of_what_only_it_makes_final() -> None:
    flow = Flow(JOB, 0.0, 10.0, 2.0, total=1000.0, last_bytes=600.0)
    assert [flow.released(at) for at in (0.0, 4.0, 8.0, 9.0, 10.0, 11.0)] == [0.0, 200.0, 400.0, 700.0, 1000.0, 1000.0]
    assert flow.peak == 300.0


def test_what_was_cached_is_let_go_at_once() -> None:
    flow = Flow(JOB, 0.0, 10.0, 10.0, total=1000.0, last_bytes=400.0, at_once=600.0)
    assert flow.released(0.0) == 600.0
    assert flow.released(5.0) == 800.0


def test_a_prefill_that_is_set_aside_lets_nothing_go() -> None:
    flow = Flow(JOB, 0.0, 10.0, 2.0, total=1000.0, last_bytes=600.0)
    assert flow.released(4.0) == 200.0
    flow.rest(4.0)
    assert not flow.complete
    assert flow.slope(20.0) == 0.0
    assert flow.released(20.0) == 200.0
    flow.resume(24.0)
    assert flow.complete
    assert [flow.released(at) for at in (24.0, 28.0, 30.0)] == [200.0, 400.0, 1000.0]
    assert flow.ends_at == 30.0


def test_slopes_and_bends_follow_the_curve() -> None:
    flow = Flow(JOB, 0.0, 10.0, 2.0, total=1000.0, last_bytes=600.0)
    assert (flow.slope(0.0), flow.bends_at(0.0)) == (50.0, 8.0)
    assert (flow.slope(8.0), flow.bends_at(8.0)) == (pytest.approx(300.0), 10.0)
    assert (flow.slope(10.0), flow.bends_at(10.0)) == (0.0, float("inf"))
