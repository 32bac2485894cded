"""Ranks of several gateways' jobs in one order."""

import random

from node.ranks import Ranks
from scheduler.admission.node_order import LAST


def test_one_gateways_jobs_keep_their_order_whatever_has_begun():
    ranks, source = Ranks(), random.Random(5)
    given, got = [], []
    for n in range(300):
        rank = source.randrange(10**9)
        given.append(rank)
        got.append(ranks.of("a", str(n), rank))
        if n % 3 == 0:
            ranks.began(str(source.randrange(n + 1)))
    shifts = {there - here for here, there in zip(given, got, strict=True)}
    assert len(shifts) == 1


def test_a_gateway_that_was_just_started_neither_passes_nor_waits_for_one_with_a_long_past():
    ranks, order = Ranks(), []
    waiting = {}
    for n in range(20):  # both always have work of the same size ahead of their own time
        waiting[f"old{n}"] = ranks.of("old", f"old{n}", 5_000_000 + n * 1000)
        waiting[f"new{n}"] = ranks.of("new", f"new{n}", n * 1000)
    while waiting:
        job = min(waiting, key=lambda name: waiting[name])
        del waiting[job]
        ranks.began(job)
        order.append(job[:3])
    for at in range(0, 40, 4):
        assert set(order[at : at + 4]) == {"old", "new"}


def test_nobody_is_passed_for_ever_by_a_gateway_whose_jobs_are_all_short():
    ranks = Ranks()
    long = ranks.of("a", "first", 0) and 0
    ranks.began("first")
    long = ranks.of("a", "long", 10_000)
    passed = 0
    for n in range(1000):
        short = ranks.of("b", f"b{n}", n * 100)
        if short > long:
            break
        ranks.began(f"b{n}")
        passed += 1
    assert passed <= 102


def test_what_is_to_come_last_does_among_all_gateways():
    ranks = Ranks()
    last = ranks.of("a", "fallback", LAST + 5)
    assert last >= LAST - 10**6
    assert all(ranks.of(name, name, 10**9) < last for name in "bcd")


def test_a_gateway_that_went_leaves_nothing_and_begins_anew():
    ranks = Ranks()
    ranks.of("a", "x", 100)
    ranks.left("a")
    assert len(ranks) == 0
    ranks.began("x")
    assert ranks.of("a", "y", 7) == 0
    ranks.ended("y")
    assert len(ranks) == 0
