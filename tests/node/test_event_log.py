"""What the cache tells becomes numbered batches that an index understands, bounded in number and size."""

from __future__ import annotations

import asyncio

import pytest

from kvcache.chain import TokenChain
from kvcache.held import OwnNames
from kvcache.kept import EntryKind, StoredBlock
from kvcache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode_batch
from kvcache.quality import Quality
from node import event_log
from node.event_log import EventLog
from tests.kvcache.held import HeldSets

BLOCK = 64


def chain(blocks: int, first: int = 0, salt: str = "", lora: str = "") -> list[StoredBlock]:
    """A prompt's blocks as the cache tells them."""
    found = TokenChain.of(range(first, first + blocks * BLOCK), BLOCK, fingerprint="f", salt=salt, lora=lora)
    return [
        StoredBlock(name, found.parent(at), found.block(at), salt, lora, Quality.EXACT)
        for at, name in enumerate(found.hashes)
    ]


class Cache:
    """A prefix cache that holds what a test says."""

    def __init__(self, blocks: list[StoredBlock], snapshots: list[tuple[bytes, Quality]]) -> None:
        self.blocks, self.snapshots = blocks, snapshots

    def stored(self):
        return iter(self.blocks)

    def stored_snapshots(self):
        return iter(self.snapshots)


def batches(log: EventLog) -> list[EventBatch]:
    return [decode_batch(payload) for _, payload in log.kept_from(0)]


def held(log: EventLog) -> HeldSets:
    sets = HeldSets()
    names = OwnNames(BLOCK, sets)
    for batch in batches(log):
        names.apply(batch.events)
    return sets


async def test_a_burst_of_changes_is_one_batch_and_comes_soon() -> None:
    log = EventLog(BLOCK, "mamba")
    told: list[int] = []
    log.on_batch.append(lambda seq, payload: told.append(seq))
    one, two, three = chain(3)
    log.stored([one, two])
    log.snapshot(two.hash, Quality.EXACT)
    log.stored([three])
    log.removed([three.hash], EntryKind.BLOCK)
    assert told == []
    await asyncio.sleep(3 * event_log.GATHER_S)
    assert told == [0]
    (batch,) = batches(log)
    assert batch.events == (
        BlockStored(
            (one.hash, two.hash),
            None,
            tuple(range(2 * BLOCK)),
            BLOCK,
            None,
            "CPU",
            None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockStored((two.hash,), None, (), BLOCK, None, "CPU", None, group_idx=1, kv_cache_spec_kind="mamba"),
        BlockStored(
            (three.hash,),
            two.hash,
            three.token_ids,
            BLOCK,
            None,
            "CPU",
            None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockRemoved((three.hash,), "CPU", 0),
    )


async def test_what_is_told_is_what_an_index_holds() -> None:
    log = EventLog(BLOCK, "sliding_window")
    blocks, other = chain(4), chain(2, first=9000)
    log.stored([*blocks, *other])
    log.snapshot(blocks[3].hash, Quality.EXACT)
    log.snapshot(other[1].hash, Quality.EXACT)
    log.removed([blocks[3].hash], EntryKind.SNAPSHOT)
    log.removed([blocks[3].hash], EntryKind.BLOCK)
    log.flush()
    sets = held(log)
    assert sets.blocks == {block.hash: block.parent for block in [*blocks[:3], *other]}
    assert sets.snapshots == {other[1].hash}


async def test_a_salt_and_a_lora_are_told_as_vllm_tells_them() -> None:
    log = EventLog(BLOCK, "mamba")
    blocks = chain(2, salt="tenant", lora="law")
    log.stored(blocks)
    log.flush()
    (event,) = batches(log)[0].events
    assert isinstance(event, BlockStored)
    assert event.lora_name == "law"
    assert event.extras() == [["law", "tenant"], ["law"]]


async def test_what_is_not_exact_is_not_told() -> None:
    log = EventLog(BLOCK, "mamba")
    one, two, three = chain(3)
    near = StoredBlock(two.hash, two.parent, two.token_ids, "", "", Quality.NEAR)
    log.stored([one, near, three])
    log.snapshot(two.hash, Quality.NEAR)
    log.flush()
    assert set(held(log).blocks) == {one.hash, three.hash}
    assert held(log).snapshots == set()


async def test_a_long_prompt_and_many_removals_are_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "BATCH_TOKENS", 4 * BLOCK)
    monkeypatch.setattr(event_log, "BATCH_BLOCKS", 4)
    log = EventLog(BLOCK, "mamba")
    blocks = chain(10)
    log.stored(blocks)
    log.flush()
    assert [len(event.token_ids) // BLOCK for batch in batches(log) for event in batch.events] == [4, 4, 2]
    assert set(held(log).blocks) == {block.hash for block in blocks}
    log.removed([block.hash for block in reversed(blocks)], EntryKind.BLOCK)
    log.flush()
    assert log.next_seq == 6
    assert not held(log).blocks


async def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 3)
    log = EventLog(BLOCK, "mamba")
    for block in chain(5):
        log.stored([block])
        log.flush()
    assert (log.first_seq, log.next_seq) == (2, 5)
    assert [seq for seq, _ in log.kept_from(0)] == [2, 3, 4]
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 100)
    log = EventLog(BLOCK, "mamba")
    log._allowed_bytes = 1000
    for block in chain(5):
        log.stored([block])
        log.flush()
    assert log.next_seq == 5
    assert sum(len(payload) for _, payload in log.kept_from(0)) <= 1000


async def test_telling_anew_clears_and_tells_all_that_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "BATCH_TOKENS", 2 * BLOCK)
    log = EventLog(BLOCK, "mamba")
    blocks = chain(5)
    log.stored(chain(1, first=7000))
    cache = Cache(blocks, [(blocks[4].hash, Quality.EXACT), (blocks[2].hash, Quality.NEAR)])
    first = log.restate(cache)
    assert first == 1
    assert log.first_seq == first, "nothing from before is kept"
    assert isinstance(batches(log)[0].events[0], AllBlocksCleared)
    assert set(held(log).blocks) == {block.hash for block in blocks}
    assert held(log).snapshots == {blocks[4].hash}


async def test_what_is_told_anew_is_kept_whole_however_much_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "BATCH_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(event_log, "KEPT_BYTES", 500)
    log = EventLog(BLOCK, "mamba")
    blocks = chain(40)
    first = log.restate(Cache(blocks, []))
    assert log.first_seq == first
    assert set(held(log).blocks) == {block.hash for block in blocks}
    log.stored(chain(1, first=7000))
    log.flush()
    assert log.first_seq == first, "and what follows does not push it out at once"
