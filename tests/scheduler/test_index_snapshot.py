from __future__ import annotations

import random

import pytest

from scheduler.index_snapshot import SnapshotError, dump, restore
from scheduler.prefix_index import Match, PrefixIndex
from tests.scheduler.prompts import Prompts, names
from tests.scheduler.test_prefix_index import check_integrity

ABC = names("a", "b", "c")


def small() -> bytes:
    one = PrefixIndex(100, snapshots=True)
    one.stored("n", ABC, None)
    return dump(one, {"n": 7}, key="model", now=0.0)


def test_a_restored_index_answers_as_the_old_one_and_goes_on() -> None:
    rng = random.Random(5)
    prompts = Prompts(rng)
    old = PrefixIndex(10_000, snapshots=True, history_s=100.0)
    asked = []
    for step in range(150):
        prompt = prompts.fresh(200)
        node, first = rng.choice("abc"), rng.choice([0, rng.randrange(len(prompt))])
        old.stored(node, prompt[first:], prompt[first - 1] if first else None)
        old.snapshot(node, rng.choice(prompt))
        old.removed(node, rng.sample(prompt, len(prompt) // 5))
        old.sent(rng.choice("xy"), prompt, now=float(step))
        asked.append(prompt)
    old.forget("c")
    data = dump(old, {"a": 17, "b": 2}, key="model", now=150.0)
    new = PrefixIndex(10_000, snapshots=True, history_s=100.0)
    assert restore(data, new, key="model", now=1000.0) == {"a": 17, "b": 2}
    check_integrity(new)
    assert len(new) == len(old)
    for prompt in asked:
        assert new.match(prompt) == old.match(prompt)
    for one, now in ((old, 200.0), (new, 1050.0)):
        one.expire(now)
        one.cleared("b")
        one.stored("a", asked[0], None)
        one.sent("x", asked[1], now)
    for prompt in asked:
        assert new.match(prompt) == old.match(prompt)
    check_integrity(new)


def test_blocks_whose_parent_was_unknown_still_wait_for_it() -> None:
    old = PrefixIndex(100, snapshots=False)
    old.stored("n", ABC[1:], ABC[0])
    new = PrefixIndex(100, snapshots=False)
    restore(dump(old, {}, key="", now=0.0), new, key="", now=0.0)
    new.stored("n", ABC[:1], None)
    assert new.match(ABC) == {"n": Match(3, 3)}


def test_a_smaller_index_takes_what_fits() -> None:
    old = PrefixIndex(1000, snapshots=False)
    for number in range(20):
        old.stored("n", names(number, *range(9)), None)
    new = PrefixIndex(55, snapshots=False)
    restore(dump(old, {}, key="", now=0.0), new, key="", now=0.0)
    check_integrity(new)
    assert len(new) == 50


def test_a_torn_snapshot_is_refused_wherever_it_is_torn() -> None:
    data = small()
    for length in range(len(data)):
        with pytest.raises(SnapshotError):
            restore(data[:length], PrefixIndex(100, snapshots=True), key="model", now=0.0)
    for position in range(len(data)):
        wrong = bytearray(data)
        wrong[position] ^= 1
        one = PrefixIndex(100, snapshots=True)
        with pytest.raises(SnapshotError):
            restore(bytes(wrong), one, key="model", now=0.0)
        assert len(one) == 0
        assert not one.reporting


def test_a_snapshot_of_something_else_is_refused_by_field() -> None:
    with pytest.raises(SnapshotError, match="key: the snapshot is of 'model', not of 'other'"):
        restore(small(), PrefixIndex(100, snapshots=True), key="other", now=0.0)
    with pytest.raises(SnapshotError, match="snapshots: True in the snapshot, False here"):
        restore(small(), PrefixIndex(100, snapshots=False), key="model", now=0.0)
