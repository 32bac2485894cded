"""Decode nodes that cannot prefill, and requests that cannot be split: what external engines may be."""

from __future__ import annotations

from scheduler.decision import Reason
from scheduler.facts import DecodeNodeFacts, RouteHint
from scheduler.policy import RoutingPolicy
from tests.scheduler.test_policy import decide, facts, node

DECODE_ONLY = (DecodeNodeFacts("d", 0, 4, None, prefills=False),)


def test_a_request_that_must_stay_whole_is_prefilled_where_it_is_decoded() -> None:
    decision = decide(facts(whole=True))
    assert (decision.reason, decision.remote) == (Reason.WHOLE, False)
    assert decision.chosen is not None
    assert (decision.chosen.prefill_node, decision.chosen.decode_node) == (None, "d")
    assert RoutingPolicy().fall_back(facts(whole=True)).chosen == decision.chosen


def test_where_nothing_at_home_can_prefill_even_a_short_prompt_leaves() -> None:
    for tokens in (1, 10, 2000):
        decision = decide(facts(tokens, local=(), decode=DECODE_ONLY))
        assert (decision.reason, decision.remote) == (Reason.NO_WAY_AT_HOME, True)


def test_a_decode_node_that_cannot_prefill_leaves_short_prompts_to_the_local_prefill_node() -> None:
    decision = decide(facts(10, decode=DECODE_ONLY))
    assert decision.reason is Reason.BELOW_THRESHOLD
    assert decision.chosen is not None
    assert decision.chosen.prefill_node == "p-local"


def test_where_nothing_at_all_can_prefill_it_waits() -> None:
    full = (node("p-east", slots=0),)
    assert decide(facts(local=(), remote=full, decode=DECODE_ONLY)).reason is Reason.OVERLOADED


def test_where_nothing_is_there_that_could_prefill_waiting_would_not_help() -> None:
    assert decide(facts(local=(), remote=(), decode=DECODE_ONLY)).reason is Reason.NO_PREFILL
    assert decide(facts(local=(), decode=DECODE_ONLY, hint=RouteHint.LOCAL)).reason is Reason.NO_PREFILL
    assert RoutingPolicy().fall_back(facts(local=(), decode=DECODE_ONLY)).reason is Reason.NO_PREFILL
