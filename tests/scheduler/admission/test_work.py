"""What a request is expected to be, what is held back, and how fast a queue drains."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scheduler.admission.draining import WINDOW_S, DrainRate
from scheduler.admission.holding import HOLD_S, held_back, waits_for_room
from scheduler.admission.work import FIRST_GUESS, NOMINAL, OUTPUT_WEIGHT, ExpectedOutputs, Yardstick
from scheduler.decision import Decision, Reason
from scheduler.facts import (
    ClusterFacts,
    DecodeNodeFacts,
    Facts,
    LinkFacts,
    PrefillCurve,
    PrefillNodeFacts,
    RequestFacts,
    RouteHint,
    SizeFacts,
)
from scheduler.policy import RoutingPolicy

CURVE = PrefillCurve.at_rate(1000.0)
LINK = LinkFacts(1e9, 0.01)


def node(name: str = "p", queued_s: float = 0.0, free: int = 4, **more: Any) -> PrefillNodeFacts:
    return PrefillNodeFacts(name, int(queued_s * 1000), free, more.pop("prefill", CURVE), queued_s=queued_s, **more)


def facts(tokens: int, *nodes: PrefillNodeFacts, remote: tuple[PrefillNodeFacts, ...] = (), **more: Any) -> Facts:
    clusters = [ClusterFacts("local", True, True, nodes, LINK)]
    if remote:
        clusters.append(ClusterFacts("east", False, True, remote, LINK))
    request = RequestFacts("r", tokens, SizeFacts(1), **more)
    return Facts(request, tuple(clusters), (DecodeNodeFacts("d", 0, 4, CURVE),), 100_000)


def test_work_is_prefill_where_it_would_be_quickest_and_the_answer() -> None:
    slow = node("slow", prefill=PrefillCurve.at_rate(100.0), cached_tokens=500)
    yardstick = Yardstick(facts(1001, slow, node("quick", cached_tokens=400)))
    assert (yardstick.uncached_tokens, yardstick.prefill_s) == (600, pytest.approx(0.6))
    assert yardstick.expected_s(50) == pytest.approx(0.6 + OUTPUT_WEIGHT * 50 / 1000)
    assert yardstick.spent_s(0, 10) == pytest.approx(1.0 + OUTPUT_WEIGHT * 10 / 1000)


def test_where_nothing_was_measured_proportions_are_kept() -> None:
    long, short = (Yardstick(facts(n + 1, node(prefill=None))) for n in (10_000, 100))
    assert long.prefill_s == NOMINAL.seconds(0, 10_000)
    assert long.prefill_s / short.prefill_s == pytest.approx(100)


def test_an_account_is_expected_to_speak_as_long_as_it_did_but_no_longer_than_it_may() -> None:
    outputs = ExpectedOutputs()
    assert outputs.expect("a", 10_000) == FIRST_GUESS
    assert outputs.expect("a", 16) == 16
    for _ in range(20):
        outputs.saw("a", 1000)
    assert outputs.expect("a", 10_000) == 1000
    for number in range(10_000):
        outputs.saw(f"b{number}", 1)
    assert outputs.expect("a", 10_000) == FIRST_GUESS
    assert len(outputs._means) == 4096


def test_a_long_prompt_is_held_back_from_a_node_with_enough_to_do_and_a_short_one_is_not() -> None:
    busy = node(queued_s=HOLD_S + 1)
    policy = RoutingPolicy()
    assert held_back(policy.decide(facts(50_000, busy)))
    assert not held_back(policy.decide(facts(500, busy)))
    assert not held_back(policy.decide(facts(50_000, node(queued_s=HOLD_S - 1))))
    assert not held_back(policy.decide(facts(50_000, node(prefill=None))))
    assert not held_back(policy.decide(facts(1, busy)))


@pytest.mark.parametrize(
    ("hint", "east", "waits"),
    [
        ({}, node("e"), True),
        ({"hint": RouteHint.REMOTE}, node("e", free=0), True),
        ({"hint": RouteHint.CLUSTER, "hint_cluster": "east"}, node("e", free=0), True),
        ({"hint": RouteHint.CLUSTER, "hint_cluster": "west"}, node("e", free=0), False),
    ],
)
def test_what_waits_is_what_a_free_slot_would_help(hint: dict[str, Any], east: PrefillNodeFacts, waits: bool) -> None:
    decision = RoutingPolicy().decide(facts(500, node(free=0), remote=(east,), **hint))
    assert decision.chosen is None
    assert waits_for_room(decision) == waits


def test_a_request_that_may_be_nowhere_does_not_wait() -> None:
    decision = RoutingPolicy().decide(facts(500, node(), regions=frozenset({"eu"})))
    assert decision.reason is Reason.RESIDENCY
    assert not waits_for_room(decision)
    assert not held_back(decision)
    empty = msgspec.structs.replace(facts(500, node()), decode_nodes=())
    assert not waits_for_room(Decision(None, Reason.NO_DECODE_NODE, (), empty))


def test_a_queue_drains_as_fast_as_it_was_seen_to_of_late() -> None:
    drain = DrainRate()
    assert drain.rate(0.0) is None
    drain.busy(0.0)
    for second in range(1, 61):
        drain.took(0.5 if second > 30 else 5.0, float(second))
        drain.busy(float(second))
    assert drain.rate(60.0) == pytest.approx(0.5)
    assert drain.rate(60.0 + WINDOW_S) == 0.0
    drain.empty()
    assert drain.rate(100.0) is None
