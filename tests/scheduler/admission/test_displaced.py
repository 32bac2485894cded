"""Long prompts that only the state of the remote clusters keeps at home: after all other work, and little of it."""

from __future__ import annotations

from msgspec.structs import replace

from scheduler.admission.holding import displaced, held_back
from scheduler.decision import Decision, Reason
from scheduler.facts import Facts, Prices
from scheduler.policy import RoutingPolicy
from scheduler.values import PolicyValues
from tests.scheduler.test_policy import LINK, facts, node


def decide(given: Facts, values: PolicyValues | None = None) -> Decision:
    return RoutingPolicy(values).decide(given)


def with_east(given: Facts, **changes: object) -> Facts:
    home, east = given.clusters
    return replace(given, clusters=(home, replace(east, **changes)))


def slow_link(given: Facts, **changes: object) -> Facts:
    """The way from there takes a hundred times as long as it did."""
    return with_east(given, link=replace(LINK, bytes_per_s=1e4, **changes))


def busy(seconds: float) -> Facts:
    """At home that many seconds of prefill wait, of 100 tokens a second."""
    return facts(local=(node("p-local", queued=int(seconds * 100), speed=100.0),))


def test_a_long_prompt_is_displaced_where_the_cluster_that_would_take_it_is_lost_or_suspended() -> None:
    assert not displaced(decide(facts()))
    assert displaced(decide(with_east(facts(), reachable=False)))
    assert displaced(decide(with_east(facts(), suspended=True)))


def test_so_is_one_that_stays_because_that_cluster_is_slower_or_its_link_congested() -> None:
    slower = decide(slow_link(facts()))
    assert (slower.reason, displaced(slower)) == (Reason.REMOTE_SLOWER, True)
    congested = decide(slow_link(facts(), congested=True))
    assert (congested.reason, displaced(congested)) == (Reason.LINK_CONGESTED, True)
    dear = decide(with_east(facts(), prices=Prices(prefill_per_s=1e6)), PolicyValues(seconds_per_unit=1.0))
    assert (dear.reason, displaced(dear)) == (Reason.REMOTE_DEARER, False), "home is what it chose"


def test_one_that_could_not_have_gone_there_or_would_have_stayed_is_not() -> None:
    lost = with_east(facts(allowed_clusters=frozenset()), reachable=False)
    assert not displaced(decide(lost)), "its key names no remote cluster"
    assert not displaced(decide(with_east(facts(tokens=500), reachable=False))), "it is short"
    alone = facts()
    assert not displaced(decide(replace(alone, clusters=alone.clusters[:1]))), "no remote cluster was ever registered"


def test_what_comes_last_on_a_node_keeps_displaced_prompts_out_and_delays_nobody_else() -> None:
    behind = facts(local=(replace(node("p-local", speed=100.0), last_s=2.0),))
    assert held_back(decide(with_east(behind, reachable=False)))
    short = decide(replace(behind, request=replace(behind.request, prompt_tokens=500)))
    alone = decide(facts(tokens=500))
    assert short.chosen is not None
    assert alone.chosen is not None
    assert short.chosen.predicted_ttft_s == alone.chosen.predicted_ttft_s


def waits(given: Facts, seconds: float) -> Facts:
    return replace(given, request=replace(given.request, waited_s=seconds))


def test_who_has_waited_for_a_busy_home_longer_than_a_slower_way_takes_goes_there() -> None:
    """At home 5 s lie before it and it takes 20; away, behind the slow link, some 30."""
    given = slow_link(busy(5.0))
    away = next(o.predicted_ttft_s for o in decide(given).options if o.cluster == "east")
    assert away is not None
    assert 25.0 < away < 60.0
    for waited, remote in ((0.0, False), (away - 25.5, False), (away - 24.5, True)):
        assert decide(waits(given, waited)).remote is remote


def test_a_home_with_room_is_taken_however_long_it_had_none() -> None:
    assert not decide(waits(slow_link(busy(0.0)), 1000.0)).remote


def test_a_congested_link_carries_one_transfer_at_a_time_for_those_that_wait() -> None:
    given = with_east(facts(), link=replace(LINK, congested=True))
    assert decide(given).reason is Reason.LINK_CONGESTED
    assert decide(waits(given, 0.1)).remote
    taken = with_east(facts(), link=replace(LINK, congested=True, queued_bytes=1))
    assert decide(waits(taken, 0.1)).reason is Reason.LINK_CONGESTED


def test_waiting_changes_nothing_for_what_belongs_at_home() -> None:
    short = slow_link(replace(busy(5.0), request=facts(tokens=900).request))
    assert decide(waits(short, 1000.0)) == replace(decide(short), facts=waits(short, 1000.0))


def test_displaced_prompts_wait_outside_once_a_second_of_prefill_lies_on_their_node() -> None:
    assert held_back(decide(with_east(busy(2.0), reachable=False)))
    assert not held_back(decide(with_east(busy(0.5), reachable=False)))
    alone = busy(2.0)
    assert not held_back(decide(replace(alone, clusters=alone.clusters[:1]))), "home's own work is held later"
