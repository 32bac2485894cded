"""The queue: fair by work, ordered by rank, bounded, and it keeps nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission.fair_queue import PRIORITY_S, STRETCH, FairQueue, QueueFull, Waiting, rank
from tests.calm import calm


def waiting(account: str, work_s: float = 1.0, arrived: float = 0.0, priority: int = 0, **more: Any) -> Waiting:
    return Waiting(account, work_s, more.pop("tokens", 1), rank(arrived, work_s, priority), **more)


def take(queue: FairQueue) -> Waiting:
    found = queue.next()
    assert found is not None
    queue.take(found)
    return found


works = st.floats(0.01, 100)


@calm
@given(st.lists(works, min_size=1, max_size=40), st.lists(works, min_size=1, max_size=40), st.floats(0.25, 8))
def test_two_that_wait_all_the_time_get_work_by_their_weights(
    ours: list[float], theirs: list[float], weight: float
) -> None:
    queue = FairQueue(1000, 10**6)
    for at, work in enumerate(ours):
        queue.add(waiting("a", work, at, weight=weight))
    for at, work in enumerate(theirs):
        queue.add(waiting("b", work, at))
    got = {"a": 0.0, "b": 0.0}
    while len(queue.shares) == 2:
        entry = take(queue)
        got[entry.account] += entry.work_s / entry.weight
        assert abs(got["a"] - got["b"]) <= max(ours) / weight + max(theirs) + 1e-6


@calm
@given(st.lists(st.tuples(st.floats(0, 5), works, st.integers(-3, 3)), min_size=2, max_size=40))
def test_a_request_is_overtaken_only_within_a_time_that_is_its_own(arrivals: list[tuple[float, float, int]]) -> None:
    queue, now, entries = FairQueue(1000, 10**6), 0.0, []
    for pause, work, priority in arrivals:
        now += pause
        entry = waiting("a", work, now, priority)
        queue.add(entry)
        entries.append((entry, now, STRETCH * work + PRIORITY_S * (priority + 3)))
    order = [take(queue) for _ in entries]
    for entry, arrived, patience in entries:
        before = order[: order.index(entry)]
        assert all(came <= arrived + patience + 1e-9 for other, came, _ in entries if other in before)


def test_short_ones_pass_a_long_one_but_not_for_ever() -> None:
    queue = FairQueue(1000, 10**6)
    long = waiting("a", 13.0, arrived=0.0)
    queue.add(long)
    for second in range(100):
        queue.add(waiting("a", 0.05, arrived=float(second)))
    order = [take(queue) for _ in range(101)]
    assert order.index(long) == 26


def test_a_flood_delays_another_tenant_by_one_request_however_long_the_flood_is() -> None:
    queue = FairQueue(1000, 10**6)
    for _ in range(500):
        queue.add(waiting("flood"))
    for _ in range(100):
        take(queue)
    other = waiting("b", arrived=1e6)
    queue.add(other)
    assert other in (take(queue), take(queue))


def test_nobody_saves_up_a_right_to_be_served_first() -> None:
    queue = FairQueue(1000, 10**6)
    for _ in range(200):
        queue.charge("busy", 1.0, 1.0)
    for name in ("busy", "back"):
        for _ in range(20):
            queue.add(waiting(name))
    served = [take(queue).account for _ in range(20)]
    assert 9 <= served.count("back") <= 11


def test_work_that_was_underestimated_is_paid_for_afterwards() -> None:
    queue = FairQueue(1000, 10**6)
    for name in ("a", "b"):
        for _ in range(30):
            queue.add(waiting(name))
    assert take(queue).account == "a"
    queue.settle("a", 10.0, 1.0)
    assert [take(queue).account for _ in range(11)] == ["b"] * 11


def test_what_cannot_be_placed_holds_up_nothing_else() -> None:
    queue = FairQueue(1000, 10**6)
    east, home = waiting("a", needs="east"), waiting("a", arrived=5.0, needs="home")
    fallback = waiting("b", last=True)
    for entry in (fallback, east, home):
        queue.add(entry)
    assert queue.next() is east
    assert queue.next({"east"}) is home
    assert queue.next({"east", "home"}) is fallback
    assert queue.anybody_before(last=False)
    queue.remove(east)
    queue.remove(home)
    assert not queue.anybody_before(last=False)
    assert queue.anybody_before(last=True)


def test_who_has_the_same_needs_as_one_that_comes_last_is_told_and_nobody_else() -> None:
    queue = FairQueue(1000, 10**6)
    long = waiting("a", needs="long", last=True)
    queue.add(long)
    queue.add(waiting("a", needs="short"))
    assert [queue.anybody_last(needs) for needs in ("long", "short", "other")] == [True, False, False]
    queue.remove(long)
    assert not queue.anybody_last("long")


def test_who_fills_the_queue_makes_room_for_who_does_not() -> None:
    queue = FairQueue(4, 10**6)
    flood = [waiting("flood", arrived=float(at)) for at in range(4)]
    for entry in flood:
        queue.add(entry)
    with pytest.raises(QueueFull) as alone:
        queue.add(waiting("flood"))
    assert (alone.value.what, alone.value.own) == ("requests", False)
    assert queue.add(waiting("b")) == [flood[3]]
    assert queue.add(waiting("b")) == [flood[2]]
    with pytest.raises(QueueFull) as shared:
        queue.add(waiting("b"))
    assert shared.value.own
    assert queue.shares == {"flood": 2, "b": 2}


def test_prompts_are_bounded_by_their_tokens_too_and_one_alone_always_fits() -> None:
    queue = FairQueue(100, 1000)
    big = waiting("a", tokens=5000)
    assert queue.add(big) == []
    assert queue.add(waiting("b", tokens=900)) == [big]
    with pytest.raises(QueueFull, match="tokens"):
        queue.add(waiting("b", tokens=200))


def test_the_wait_that_is_predicted_is_the_work_that_goes_first() -> None:
    queue = FairQueue(1000, 10**6)
    for at in range(100):
        queue.add(waiting("flood", arrived=float(at)))
    queue.add(waiting("b", 2.0))
    assert queue.ahead_s(waiting("b", 1.0, arrived=10.0)) == 2.0 + 3.0
    assert queue.ahead_s(waiting("flood", 1.0, arrived=200.0)) == 100.0 + 2.0


@calm
@given(st.integers(0, 10**9))
def test_it_stays_within_its_bounds_serves_all_and_keeps_nothing(seed: int) -> None:
    source = random.Random(seed)
    queue, kept = FairQueue(12, 300), set[Waiting]()
    for step in range(120):
        name = source.choice("abc")
        entry = waiting(name, source.random(), step, tokens=source.randrange(1, 90), needs=source.choice("xy"))
        action = source.random()
        if action < 0.6:
            try:
                lost = queue.add(entry)
            except QueueFull:
                assert len(queue) == 12 or queue.tokens + entry.tokens > 300
            else:
                kept = (kept | {entry}) - set(lost)
        elif kept:
            gone = source.choice(sorted(kept, key=lambda one: (one.rank, one.account)))
            kept.discard(gone)
            queue.remove(gone)
            queue.remove(gone)
        assert len(queue) == len(kept) <= 12
        assert queue.tokens == sum(one.tokens for one in kept)
        assert queue.tokens <= 300
        assert sum(queue.shares.values()) == len(kept)
    while (entry := queue.next()) is not None:  # type: ignore[assignment]
        kept.remove(entry)
        queue.take(entry)
    assert not kept
    assert not queue.shares
    assert queue.tokens == 0


def test_accounts_that_came_once_are_forgotten() -> None:
    queue = FairQueue(10, 10)
    for number in range(20_000):
        queue.charge(f"key:{number}", 1.0, 1.0)
    assert len(queue._had) < 5000
