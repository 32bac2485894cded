"""Kept prefixes."""

from __future__ import annotations

from scheduler.simulator.prefixes import PrefixStore, StoreSpec


def test_a_prefix_is_held_up_to_its_first_strange_block_and_in_full_blocks_only() -> None:
    store = PrefixStore(StoreSpec(10, 1))
    store.keep((1, 2, 3, 4), 35)
    assert store.match((1, 2, 3, 4), 100) == (30, 30)
    assert store.match((1, 2, 9, 3), 100) == (20, 20)
    assert store.match((1, 2, 3), 25) == (20, 20)
    assert store.match((7,), 100) == (0, 0)


def test_states_are_taken_up_only_at_snapshots() -> None:
    store = PrefixStore(StoreSpec(10, 1, snapshot_bytes=5, snapshot_blocks=2))
    store.keep((1, 2, 3, 4, 5), 50)
    assert store.match((1, 2, 3, 4, 5), 50) == (50, 50)
    assert store.match((1, 2, 3, 9), 50) == (20, 30)
    assert store.match((1, 9), 50) == (0, 10)


def test_what_was_used_least_lately_goes_first_and_a_prompts_end_before_its_beginning() -> None:
    store = PrefixStore(StoreSpec(10, 1, capacity_bytes=4))
    store.keep((1, 2, 3), 30)
    store.keep((4, 5), 20)
    assert store.match((1, 2, 3), 30) == (20, 20)
    store.keep((6, 7), 20)
    assert store.match((4, 5), 20) == (0, 0)
    assert store.match((1, 2, 3), 30) == (20, 20)
    assert store.used_bytes == 4


def test_a_store_that_is_cleared_holds_nothing() -> None:
    store = PrefixStore(StoreSpec(10, 1))
    store.keep((1, 2), 20)
    store.clear()
    assert store.match((1, 2), 20) == (0, 0)
    assert store.used_bytes == 0
