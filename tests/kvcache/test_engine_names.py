"""Engine hashes of any kind and size become our names, and what is held is what the engine holds whole."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvcache import engine_names
from kvcache.engine_names import EngineNames
from kvcache.hashing import block_hashes
from kvcache.held import OwnNames
from kvcache.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEventError, encode_extras
from tests.kvcache.held import HeldSets

BLOCK = 8
FULL, SLIDING, MAMBA = "full_attention", "sliding_window", "mamba"


def stored(
    names: list[BlockHash], tokens: list[int], parent: BlockHash | None = None, size: int = 8, **more: Any
) -> BlockStored:
    plain: dict[str, Any] = {"lora_id": None, "medium": "GPU", "lora_name": None}
    return BlockStored(tuple(names), parent, tuple(tokens), size, **(plain | more))


def removed(*names: BlockHash, medium: str | None = "GPU", group: int | None = None) -> BlockRemoved:
    return BlockRemoved(names, medium, group)


def ours(tokens: list[int], salt: str = "", lora: str = "") -> list[bytes]:
    return block_hashes(tokens, BLOCK, fingerprint="f", salt=salt, lora=lora)


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(500) for at in range(count)]


class Source:
    """Names fed by events, and what they said."""

    def __init__(self, **options: Any) -> None:
        self.held = HeldSets()
        self.names = EngineNames(BLOCK, "f", self.held, **options)

    def say(self, *events: Any) -> None:
        self.names.apply(events)

    @property
    def blocks(self) -> set[bytes]:
        return set(self.held.blocks)


def test_engine_blocks_of_our_size_become_ours_one_by_one() -> None:
    source, ids = Source(), tokens(24)
    source.say(stored([1, b"two"], ids[:16]), stored([-3], ids[16:], b"two"))
    assert list(source.held.blocks.items()) == list(zip(ours(ids), [None, *ours(ids)[:2]], strict=True))
    source.say(removed(b"two"))
    assert source.blocks == {ours(ids)[0], ours(ids)[2]}
    source.say(stored([b"two"], ids[8:16], 1))
    assert source.blocks == set(ours(ids))


def test_an_engine_block_of_several_of_ours_holds_and_loses_them_all() -> None:
    source, ids = Source(), tokens(48)
    source.say(stored([1, 2], ids, size=24))
    assert source.blocks == set(ours(ids))
    source.say(removed(1))
    assert source.blocks == set(ours(ids)[3:])


def test_ours_is_held_only_while_each_part_of_it_is() -> None:
    source, ids = Source(), tokens(16)
    source.say(stored([1], ids[:4], size=4))
    assert source.blocks == set()
    source.say(stored([2, 3], ids[4:12], 1, size=4))
    assert source.blocks == {ours(ids)[0]}
    source.say(removed(1))
    assert source.blocks == set()
    source.say(stored([4], ids[12:16], 3, size=4))
    assert source.blocks == {ours(ids)[1]}
    source.say(stored([1], ids[:4], size=4))
    assert source.blocks == set(ours(ids))


def test_a_block_of_ours_that_two_prompts_continue_differently_is_two() -> None:
    source, head, one, two = Source(), tokens(4), tokens(4, 1), tokens(4, 2)
    source.say(stored([1, 2], head + one, size=4), stored([3], two, 1, size=4))
    assert source.blocks == {ours(head + one)[0], ours(head + two)[0]}
    source.say(removed(2))
    assert source.blocks == {ours(head + two)[0]}
    source.say(removed(1))
    assert source.blocks == set()


@pytest.mark.parametrize("seed", range(100))
def test_whatever_comes_and_goes_held_is_what_every_engine_block_covers(seed: int) -> None:
    draw = random.Random(seed)
    engine, own = draw.choice([(draw.randint(1, 20), draw.randint(1, 20)), (8, 8), (4, 16), (32, 8), (6, 8)])
    held = HeldSets()
    names = EngineNames(own, "f", held)
    tree: list[tuple[int | None, list[int]]] = []  # of each engine block: its parent, and all tokens to its end
    present: set[int] = set()
    for _ in range(60):
        candidates = sorted(present)
        if candidates and draw.random() < 0.4:
            gone = draw.sample(candidates, min(len(candidates), draw.randint(1, 3)))
            names.apply([BlockRemoved(tuple(gone), "GPU")])
            present.difference_update(gone)
        elif tree and draw.random() < 0.5:  # one that was there before comes back; its parent is here, as it must be
            again = [at for at, (parent, _) in enumerate(tree) if parent is None or parent in present]
            at = draw.choice(again)
            parent, path = tree[at]
            names.apply([stored([at], path[-engine:], parent, engine)])
            present.add(at)
        else:
            parent = draw.choice([None, *candidates])
            path = [] if parent is None else tree[parent][1]
            run = [draw.randrange(100) for _ in range(engine * draw.randint(1, 3))]
            first = len(tree)
            count = len(run) // engine
            for step in range(count):
                above = parent if step == 0 else first + step - 1
                tree.append((above, path + run[: (step + 1) * engine]))
            names.apply([stored(list(range(first, first + count)), run, parent, engine)])
            present.update(range(first, first + count))
        assert set(held.blocks) == expected(tree, present, engine, own)
    names.apply([BlockRemoved(tuple(present), "GPU")])
    assert not held.blocks
    assert not names._blocks, "what is gone is forgotten"
    assert not names._ours


def expected(tree: list[tuple[int | None, list[int]]], present: set[int], engine: int, own: int) -> set[bytes]:
    found = set()
    for at, (_, path) in enumerate(tree):
        line = [at]
        while (above := tree[line[-1]][0]) is not None:
            line.append(above)
        line.reverse()
        for number, name in enumerate(block_hashes(path, own, fingerprint="f", salt="")):
            covering = line[number * own // engine : -(-(number + 1) * own // engine)]
            if all(part in present for part in covering):
                found.add(name)
    return found


def test_a_prompts_salt_and_lora_are_part_of_its_names() -> None:
    source, ids = Source(), tokens(16)
    source.say(
        stored([1, 2], ids, extra_keys=encode_extras([["t"], []])),
        stored([3, 4], ids, cache_salt="u"),
        stored([5, 6], ids, lora_id=1, lora_name="law", extra_keys=encode_extras([["law", "t"], ["law"]])),
        stored([7, 8], ids, lora_id=3),
    )
    assert source.blocks == {
        name for salt, lora in (("t", ""), ("u", ""), ("t", "law"), ("", "#3")) for name in ours(ids, salt, lora)
    }


def test_a_continuation_has_the_salt_and_lora_of_its_beginning() -> None:
    source, ids = Source(), tokens(16)
    source.say(stored([1], ids[:8], lora_name="law", cache_salt="t"), stored([2], ids[8:], 1, lora_name="law"))
    assert source.blocks == set(ours(ids, "t", "law"))


def test_blocks_of_more_than_tokens_and_all_after_them_have_no_name_of_ours() -> None:
    source, ids = Source(), tokens(32)
    source.say(stored([1, 2, 3], ids[:24], extra_keys=encode_extras([[], ["image"], []])), stored([4], ids[24:], 3))
    assert source.blocks == {ours(ids)[0]}
    assert (source.names.unreadable, source.names.orphans) == (2, 1)


def test_a_block_whose_tokens_do_not_fit_its_size_is_not_held() -> None:
    source = Source()
    source.say(stored([1, 2], tokens(15)))
    assert source.blocks == set()
    assert source.names.unreadable == 2


def test_an_orphan_waits_for_its_parent() -> None:
    source, ids = Source(), tokens(32)
    source.say(stored([3], ids[16:24], 2), stored([4], ids[24:], 3))
    assert source.blocks == set()
    assert source.names.orphans == 2
    source.say(stored([1, 2], ids[:16]))
    assert source.blocks == set(ours(ids))


def test_orphans_are_bounded_and_a_long_line_of_them_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    source, ids = Source(), tokens(8 * 1020)
    for at in range(1019, 0, -1):
        source.say(stored([at], ids[at * 8 : at * 8 + 8], at - 1))
    source.say(stored([0], ids[:8]))
    assert len(source.blocks) == 1020
    monkeypatch.setattr(engine_names, "MAX_ORPHANS", 2)
    bounded = Source()
    for at in (3, 2, 1):
        bounded.say(stored([at], ids[at * 8 : at * 8 + 8], at - 1))
    bounded.say(stored([0], ids[:8]))
    assert bounded.blocks == set(ours(ids)[:3]), "the oldest orphan was let go"


def test_a_block_is_held_until_it_has_left_every_medium() -> None:
    source, ids = Source(), tokens(8)
    source.say(stored([1], ids), stored([1], [], medium="CPU"), stored([9], [], medium="CPU"))
    source.say(removed(1))
    assert source.blocks == set(ours(ids))
    source.say(removed(1, medium="CPU"))
    assert source.blocks == set()
    source.say(stored([1], ids), stored([1], [], medium="CPU"), removed(1, medium=None))
    assert source.blocks == set()


def test_an_engine_that_names_no_medium_when_it_stores_may_name_one_when_it_removes() -> None:
    source = Source()
    source.say(stored([1], tokens(8), medium=None), removed(1, medium="GPU"))
    assert source.blocks == set()


def test_clearing_forgets_everything_and_what_comes_after_counts() -> None:
    source, ids = Source(), tokens(16)
    source.say(stored([1], ids[:8]), AllBlocksCleared(), stored([2], ids[8:], 1))
    assert source.blocks == set()
    source.say(stored([1], ids[:8]))
    assert source.blocks == set(ours(ids))


def test_groups_of_a_hybrid_are_one_prefix_and_what_they_all_have_can_be_resumed() -> None:
    """As vLLM tells it: a sliding group names the last of the step's blocks, yet gives the tokens of the whole step."""
    source, ids = Source(), tokens(40)
    window = {"group_idx": 1, "kv_cache_spec_kind": SLIDING, "kv_cache_spec_sliding_window": 17}
    source.say(stored([3, 4, 5], ids, **window), stored([1, 2, 3, 4, 5], ids, group_idx=0, kv_cache_spec_kind=FULL))
    names = ours(ids)
    assert source.blocks == set(names)
    assert source.held.snapshots == {names[3], names[4]}, "17 tokens of window want the block before, too"
    source.say(removed(4, group=1))
    assert source.blocks == set(names)
    assert source.held.snapshots == set()


def test_a_state_is_there_at_exactly_one_block() -> None:
    source, ids = Source(), tokens(24)
    source.say(
        stored([1, 2, 3], ids, group_idx=0, kv_cache_spec_kind=FULL),
        stored([2], ids, group_idx=1, kv_cache_spec_kind=MAMBA),
    )
    assert source.held.snapshots == {ours(ids)[1]}
    source.say(removed(2, group=1))
    assert source.held.snapshots == set()


def test_a_prompt_resumes_only_at_the_end_of_a_block_of_ours() -> None:
    source, ids = Source(), tokens(16)
    states = {"group_idx": 1, "kv_cache_spec_kind": MAMBA}
    source.say(stored([1, 2, 3, 4], ids, size=4), stored([1, 3], ids, size=4, **states))
    assert source.held.snapshots == set()
    source.say(stored([4], ids, size=4, **states))
    assert source.held.snapshots == {ours(ids)[1]}


def test_what_was_known_can_be_loaded_and_goes_on_as_it_was() -> None:
    source, ids = Source(), tokens(48)
    window = {"group_idx": 1, "kv_cache_spec_kind": SLIDING, "kv_cache_spec_sliding_window": 5}
    source.say(stored([1, b"two", 3, 4], ids[:16], size=4, cache_salt="t"), stored([4], ids[:16], size=4, **window))
    source.say(removed(1), stored([1], [], medium="CPU"))
    again = Source()
    again.names.load(source.names.dump())
    assert again.held.blocks == source.held.blocks
    assert again.held.snapshots == source.held.snapshots == {ours(ids, "t")[1]}
    for one in (source, again):
        one.say(stored([5, 6], ids[16:24], 4, size=4), removed(4, group=1), removed(1, medium="CPU"))
    assert again.held.blocks == source.held.blocks == dict(zip(ours(ids, "t")[1:3], ours(ids, "t")[:2], strict=True))
    assert again.held.snapshots == set()


@pytest.mark.parametrize("data", [b"", b"\x93\x90\x90", b"\x90"])
def test_what_no_names_wrote_is_refused_and_leaves_nothing(data: bytes) -> None:
    source = Source()
    with pytest.raises(KvEventError):
        source.names.load(data)
    whole = Source()
    whole.say(stored([1, 2], tokens(16)))
    kept = msgspec.msgpack.decode(whole.names.dump())
    del kept[1][0]
    with pytest.raises(KvEventError):
        source.names.load(msgspec.msgpack.encode(kept))
    assert source.blocks == set()
    assert not source.names._blocks


def test_every_group_must_have_what_it_needs_also_one_that_shows_late() -> None:
    source, ids = Source(), tokens(16)
    states = {"kv_cache_spec_kind": MAMBA}
    source.say(stored([1, 2], ids), stored([1, 2], ids, group_idx=1, **states))
    assert source.held.snapshots == set(ours(ids))
    source.say(stored([2], ids, group_idx=2, **states))
    assert source.held.snapshots == {ours(ids)[1]}
    source.say(stored([1, 2], ids, group_idx=3, kv_cache_spec_kind="unheard_of"))
    assert source.held.snapshots == set()


def test_a_second_group_of_full_attention_must_hold_a_block_too() -> None:
    source, ids = Source(), tokens(16)
    source.say(stored([1, 2], ids, group_idx=0, kv_cache_spec_kind=FULL))
    source.say(stored([1], ids[:8], group_idx=1, kv_cache_spec_kind="mla_attention"))
    assert source.blocks == {ours(ids)[0]}
    source.say(removed(1, group=1))
    assert source.blocks == set()


def test_no_more_blocks_are_kept_than_allowed() -> None:
    source, ids = Source(max_blocks=3), tokens(40)
    source.say(stored([1, 2, 3, 4, 5], ids))
    assert source.blocks == set(ours(ids)[:3])
    assert source.names.unreadable == 2


def test_our_own_nodes_names_are_taken_as_they_are() -> None:
    held = HeldSets()
    names = OwnNames(BLOCK, held)
    one, two = ours(tokens(16))
    names.apply([stored([two], tokens(8), one), stored([one], tokens(8), group_idx=0)])
    names.apply([stored([two], [], group_idx=1, kv_cache_spec_kind=MAMBA)])
    assert held.blocks == {one: None, two: one}
    assert held.snapshots == {two}
    names.apply([removed(two, group=1), removed(one, group=0)])
    assert (set(held.blocks), held.snapshots) == ({two}, set())
    names.apply([stored([7], tokens(8)), stored([one], tokens(4), size=4), stored([one], tokens(8), 5)])
    names.apply([stored([b"short"], tokens(8)), stored([one], tokens(8), b"short"), removed(b"short")])
    assert names.unreadable == 5
    names.apply([AllBlocksCleared()])
    assert held.blocks == {}
