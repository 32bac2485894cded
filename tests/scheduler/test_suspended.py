"""What circuit breakers suspend is no way, and the decision shows it."""

from __future__ import annotations

from msgspec.structs import replace

from scheduler.decision import Bar, Reason
from scheduler.facts import DecodeNodeFacts, Facts, RouteHint
from scheduler.policy import RoutingPolicy
from tests.scheduler.test_policy import decide, facts, node


def with_east(given: Facts, **changes: object) -> Facts:
    home, east = given.clusters
    return replace(given, clusters=(home, replace(east, **changes)))


def test_a_suspended_cluster_is_shown_and_not_taken() -> None:
    decision = decide(with_east(facts(), suspended=True))
    assert (decision.reason, decision.remote) == (Reason.BREAKER_OPEN, False)
    assert [(o.cluster, o.allowed, o.barred) for o in decision.options] == [
        ("local", True, None),
        ("east", False, Bar.BREAKER_OPEN),
    ]


def test_a_suspended_node_leaves_the_others_of_its_cluster() -> None:
    quick = replace(node("p-a", speed=9000.0), suspended=True)
    decision = decide(facts(remote=(quick, node("p-b"))))
    assert decision.chosen is not None
    assert decision.chosen.prefill_node == "p-b"
    assert [o.prefill_node for o in decision.options if o.barred is Bar.BREAKER_OPEN] == ["p-a"]


def test_no_hint_goes_to_a_suspended_cluster() -> None:
    for hint in (RouteHint.REMOTE, RouteHint.CLUSTER):
        decision = decide(with_east(facts(hint=hint, hint_cluster="east"), suspended=True))
        assert decision.reason is Reason.HINTED_CLUSTER_UNAVAILABLE


def test_where_all_prefill_nodes_at_home_are_suspended_the_decode_node_prefills_in_place() -> None:
    out = replace(node("p-local"), suspended=True)
    decision = RoutingPolicy().fall_back(facts(local=(out,)))
    assert decision.chosen is not None
    assert decision.chosen.prefill_node is None
    short = decide(facts(tokens=500, local=(out,)))
    assert short.reason is Reason.NO_LOCAL_PREFILL


def test_a_suspended_decode_node_is_used_only_where_all_are() -> None:
    bad = DecodeNodeFacts("d-a", 0, 4, None, suspended=True)
    good = DecodeNodeFacts("d-b", 3, 4, None)
    for nodes, taken in (((bad, good), "d-b"), ((bad,), "d-a")):
        chosen = decide(facts(decode=nodes)).chosen
        assert chosen is not None
        assert chosen.decode_node == taken
    assert decide(facts(decode=(bad, replace(good, free_slots=0)))).reason is Reason.OVERLOADED
