"""Ranks that jobs get on nodes."""

from __future__ import annotations

import heapq

from scheduler.admission.node_order import LAST, NodeOrder


def test_one_that_comes_into_a_flood_is_before_nearly_all_that_the_flood_has_on_nodes() -> None:
    order = NodeOrder()
    flood = [order.sent("flood", 1.0, 1.0) for _ in range(32)]
    assert flood == sorted(flood)
    for step in range(500):
        order.ended("flood", 1.0)
        heapq.heappop(flood)
        if step % 10 == 0:
            other = order.sent("b", 1.0, 1.0)
            assert sum(rank < other for rank in flood) <= 2
            order.ended("b", 1.0)
        heapq.heappush(flood, order.sent("flood", 1.0, 1.0))


def test_a_short_one_is_before_the_long_ones_of_its_own_account() -> None:
    order = NodeOrder()
    longs = [order.sent("a", 10.0, 1.0) for _ in range(30)]
    assert order.sent("a", 0.1, 1.0) < min(longs)
    assert longs == sorted(longs)


def test_a_long_one_is_passed_by_no_more_short_work_than_it_is_long() -> None:
    order = NodeOrder()
    long, passed = order.sent("a", 10.0, 1.0), 0
    while order.sent("a", 0.1, 1.0) < long:
        order.ended("a", 0.1)
        passed += 1
    assert 95 <= passed <= 100


def test_a_weight_is_a_share_and_what_is_last_is_behind_all() -> None:
    order = NodeOrder()
    assert order.sent("gold", 2.0, 2.0) < order.sent("plain", 2.0, 1.0)
    assert order.sent("gold", 0.1, 2.0, last=True) > order.sent("plain", 10.0**6, 1.0)
    assert order.sent("gold", 10.0**9, 2.0, last=True) < 1 << 63
    assert LAST < 1 << 62


def test_nothing_is_kept_of_what_has_ended() -> None:
    order = NodeOrder()
    works = [0.5, 0.25, 0.5]
    for work in works:
        order.sent("a", work, 1.0)
    assert len(order) == 3
    for work in works:
        order.ended("a", work)
    assert len(order) == 0
    assert order.sent("b", 1.0, 1.0) == 2_250_000
