"""What a prefill node has still to do is known as well as its order and its speed are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission.node_order import LAST
from scheduler.backlog import Backlog
from scheduler.facts import PrefillCurve
from tests.calm import calm

CURVE = PrefillCurve.at_rate(1000.0)


def left(backlog: Backlog, now: float) -> tuple[float, float]:
    return backlog.seconds(CURVE, now, last=False), backlog.seconds(CURVE, now, last=True)


def test_time_passes_for_one_job_at_a_time_however_many_have_begun() -> None:
    backlog = Backlog()
    for name in "abc":
        backlog.sent(name, 0, 2000, 0)
        backlog.begun(name, 0, 10.0)
    assert left(backlog, 10.0) == (6.0, 0.0)
    assert left(backlog, 11.5) == (4.5, 0.0)
    backlog.ended("a", 12.0)
    assert left(backlog, 13.0) == (3.0, 0.0)


def test_one_that_takes_longer_than_was_thought_does_nothing_of_the_next() -> None:
    backlog = Backlog()
    for name in "ab":
        backlog.sent(name, 0, 2000, 0)
        backlog.begun(name, 0, 0.0)
    assert left(backlog, 5.0) == (2.0, 0.0)
    backlog.ended("a", 6.0)
    assert left(backlog, 7.0) == (1.0, 0.0)


def test_what_comes_last_stands_still_while_anything_else_runs() -> None:
    backlog = Backlog()
    backlog.sent("last", 0, 2000, LAST)
    backlog.begun("last", 0, 0.0)
    backlog.sent("own", 0, 1000, 5)
    backlog.begun("own", 0, 1.0)
    assert left(backlog, 1.5) == (0.5, 1.0)
    backlog.ended("own", 2.0)
    assert left(backlog, 2.5) == (0.0, 0.5)


def test_nothing_is_done_of_what_has_not_begun() -> None:
    backlog = Backlog()
    backlog.sent("a", 500, 2000, 0)
    assert left(backlog, 100.0) == (1.5, 0.0)
    backlog.begun("a", 1000, 100.0)
    assert left(backlog, 100.0) == (1.0, 0.0)


def test_it_counts_tokens_and_keeps_nothing_of_what_has_ended() -> None:
    backlog = Backlog()
    backlog.sent("a", 500, 2000, 0)
    backlog.sent("b", 0, 100, 0)
    backlog.begun("a", 1000, 1.0)
    assert (backlog.tokens, len(backlog), list(backlog)) == (1100, 2, ["a", "b"])
    backlog.begun("nobody", 0, 1.0)
    for _ in range(2):
        backlog.ended("a", 2.0)
        backlog.ended("b", 2.0)
    assert (backlog.tokens, len(backlog)) == (0, 0)
    assert left(backlog, 3.0) == (0.0, 0.0)


@calm
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_it_knows_a_node_that_keeps_to_its_order_to_the_second(seed: int, count: int) -> None:
    """A node that runs the least rank first and says when it has done a job; asked at random moments."""
    source = random.Random(seed)
    comes = sorted(
        (source.uniform(0, 10), f"j{n}", source.randrange(1, 3000), source.randrange(5)) for n in range(count)
    )
    backlog, now = Backlog(), 0.0
    left_s: dict[str, tuple[int, int, float]] = {}
    while comes or left_s:
        due = comes[0][0] if comes else float("inf")
        name, (rank, order, rest) = min(left_s.items(), key=lambda one: one[1][:2], default=("", (0, 0, float("inf"))))
        step = min(due, now + rest, now + source.uniform(0.01, 2.0))
        if name:
            left_s[name] = rank, order, rest - (step - now)
        now = step
        if now == due:
            _, came, tokens, its = comes.pop(0)
            backlog.sent(came, 0, tokens, its)
            backlog.begun(came, 0, now)
            left_s[came] = its, count - len(comes), tokens / 1000.0
        elif name and left_s[name][2] <= 1e-9:
            del left_s[name]
            backlog.ended(name, now)
        assert backlog.seconds(CURVE, now, last=False) == pytest.approx(sum(r for _, _, r in left_s.values()), abs=1e-6)
