"""Long prompts that are at home only because the remote clusters are lost: after all other work, and little of it."""

from __future__ import annotations

from msgspec.structs import replace

from scheduler.admission.holding import displaced, held_back
from scheduler.facts import Facts
from tests.scheduler.test_policy import decide, facts, node


def with_east(given: Facts, **changes: object) -> Facts:
    home, east = given.clusters
    return replace(given, clusters=(home, replace(east, **changes)))


def busy(seconds: float) -> Facts:
    """At home that many seconds of prefill wait, of 100 tokens a second."""
    return facts(local=(node("p-local", queued=int(seconds * 100), speed=100.0),))


def test_a_long_prompt_is_displaced_where_the_cluster_that_would_take_it_is_lost_or_suspended() -> None:
    assert not displaced(decide(facts()))
    assert displaced(decide(with_east(facts(), reachable=False)))
    assert displaced(decide(with_east(facts(), suspended=True)))


def test_one_that_could_not_have_gone_there_or_would_have_stayed_is_not() -> None:
    lost = with_east(facts(allowed_clusters=frozenset()), reachable=False)
    assert not displaced(decide(lost)), "its key names no remote cluster"
    assert not displaced(decide(with_east(facts(tokens=500), reachable=False))), "it is short"
    alone = facts()
    assert not displaced(decide(replace(alone, clusters=alone.clusters[:1]))), "no remote cluster was ever registered"


def test_displaced_prompts_wait_outside_once_a_second_of_prefill_lies_on_their_node() -> None:
    assert held_back(decide(with_east(busy(2.0), reachable=False)))
    assert not held_back(decide(with_east(busy(0.5), reachable=False)))
    alone = busy(2.0)
    assert not held_back(decide(replace(alone, clusters=alone.clusters[:1]))), "home's own work is held later"
