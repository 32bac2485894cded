"""Trimming a large cluster to the nodes that a decision needs to see."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from scheduler.candidates import candidates


@dataclass(frozen=True)
class Node:
    node_id: str
    queued: int = 0
    free_slots: int = 1


load = attrgetter("queued")


def names(nodes: list[Node]) -> list[str]:
    return sorted(node.node_id for node in nodes)


FLEET = [Node(f"n{at:03}", queued=(at * 37) % 200) for at in range(200)]


def test_the_least_loaded_those_that_hold_most_and_the_sessions_own_are_kept() -> None:
    held = {"n001": 5, "n002": 9, "n003": 7}
    found = candidates(FLEET, load, held, {"n009", "gone"}, keep=2)
    idlest = [node.node_id for node in sorted(FLEET, key=load)[:2]]
    assert names(found) == sorted([*idlest, "n002", "n003", "n009"])


def test_a_node_that_is_both_is_kept_once() -> None:
    idlest = min(FLEET, key=load).node_id
    assert names(candidates(FLEET, load, {idlest: 3}, {idlest}, keep=1)) == [idlest]


def test_a_full_node_is_left_out_unless_all_are() -> None:
    full = [Node(f"f{at}", free_slots=0) for at in range(3)]
    assert names(candidates([*full, Node("free", queued=9)], load, {"f1": 9}, {"f2"}, keep=2)) == ["free"]
    assert [node.free_slots for node in candidates(full, load, {}, keep=1)] == [0]


def test_a_small_cluster_is_kept_whole() -> None:
    assert candidates(FLEET[:2], load, {}) == FLEET[:2]
