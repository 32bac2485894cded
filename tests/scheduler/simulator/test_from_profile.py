"""A fleet made of a profile behaves as the stack that was measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvcache.quality import Quality
from scheduler.facts import CodecFacts, PrefillCurve
from scheduler.measured import Handling
from scheduler.policy import RoutingPolicy
from scheduler.simulator.fleet import Settings
from scheduler.simulator.from_profile import fleet_of, goals_of, values_of
from scheduler.simulator.run import Run, simulate
from tests.scheduler.profiled import CURVE, HANDLING_S, RTT_S, STEP_S, measured, site
from tests.scheduler.simulator.fleets import traffic

QUICK = replace(CURVE, token_s=CURVE.token_s / 2)
ALONE = RTT_S + HANDLING_S + STEP_S


def run(  # type: ignore[no-untyped-def]
    arrivals: list[float],
    prompts: list[int],
    outputs: list[int],
    threshold: int = 10_000,
    blocks: tuple[tuple[int, ...], ...] = (),
    **changes,
) -> Run:
    made = measured(**changes)
    coming = traffic(arrivals, prompts, outputs, blocks, 64)
    return simulate(fleet_of(made), Settings(threshold), RoutingPolicy(values_of(made)), coming)


def ttft(done: Run, n: int) -> float:
    return done.records.first_at[n] - float(done.traffic.arrival_s[n])


@pytest.mark.parametrize(("threshold", "curve"), [(10_000, CURVE), (0, QUICK)])
def test_a_lone_request_takes_what_was_measured(threshold: int, curve: PrefillCurve) -> None:
    done = run([0.0], [1000], [4], threshold, clusters=(site(prefill=QUICK),))
    assert ttft(done, 0) == pytest.approx(curve.seconds(0, 1000) + ALONE, rel=1e-6)
    assert bool(done.records.remote[0]) is (threshold == 0)
    assert done.records.done_at[0] - done.records.first_at[0] == pytest.approx(3 * STEP_S)


def test_handling_keeps_nobody_else_waiting() -> None:
    slow = site("local", handling=Handling(5.0))
    done = run([0.0, 0.0], [1000, 1000], [1, 1], home=slow, clusters=())
    assert ttft(done, 1) == pytest.approx(2 * CURVE.seconds(0, 1000) + 5.0 + RTT_S + STEP_S, rel=0.02)


def test_a_stream_joins_between_two_steps() -> None:
    second = CURVE.seconds(0, 100) + ALONE + 1.5 * STEP_S
    alone = run([0.0], [100], [30])
    both = run([0.0, second], [100, 100], [30, 1])
    begun = second + CURVE.seconds(0, 100) + RTT_S + HANDLING_S
    steps = (begun - (alone.records.first_at[0] - STEP_S)) / STEP_S
    joins = begun + (-steps % 1.0) * STEP_S
    assert both.records.first_at[1] == pytest.approx(joins + STEP_S, abs=1e-6)


def test_what_was_only_sent_to_a_node_is_not_computed_on_from_there() -> None:
    blocks = (tuple(range(10)), (*range(10), 99, 98))
    done = run([0.0, 9.0], [640, 768], [1, 1], blocks=blocks)
    assert done.records.cached_tokens == [0, 640]
    assert done.records.wire_bytes[1] == pytest.approx(1000 * 128 + 63 * 2000)


def test_what_is_prefilled_in_place_beside_streams_ends() -> None:
    done = run([0.0, 0.5], [400, 200], [40, 2], home=site("local", nodes=0), clusters=())
    assert ttft(done, 1) > CURVE.seconds(0, 200)
    assert done.records.done_at[1] > 0


def test_codecs_are_known_to_the_policy_and_shrink_what_is_sent() -> None:
    lossless = CodecFacts("lossless", Quality.EXACT, 0.5, 1e9, 1e9)
    far = site(codec="lossless", wire_ratio=0.5, prefill=QUICK)
    done = run([0.0], [1000], [1], 0, codecs=(lossless,), clusters=(far,))
    assert values_of(measured(clusters=(far,))).remote_codec == "lossless"
    assert done.records.wire_bytes[0] == pytest.approx((1000 * 1000 + 63 * 2000) / 2)


def test_goals_are_the_quickest_sites() -> None:
    assert goals_of(measured(clusters=(site(prefill=QUICK),))).curve == QUICK
