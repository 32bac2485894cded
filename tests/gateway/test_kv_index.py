"""The owner of the index: what sources say counts, in order; what they can't say again is learnt anew."""

from __future__ import annotations

import pytest

from gateway.kv_index import KEEP_LOST_S, KvIndex
from gateway.kv_lookup import Held
from gateway.sessions import NodeSession
from kvcache.blocks import BLOCK_TOKENS
from kvcache.control import Join, KvEvents, ModelInfo, ReplayKvEvents, ToNode, decode_to_node
from kvcache.hashing import block_hashes
from kvcache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent, encode_batch
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.wire import Role
from scheduler.index_snapshot import SnapshotError

_LAYER = LayerSpec(0, (TensorSpec("k", DType.FLOAT32, (1, 4)),))
FULL = KVLayout((GroupSpec(GroupKind.FULL, (_LAYER,)),))
HYBRID = KVLayout((*FULL.groups, GroupSpec(GroupKind.STATE, (_LAYER,))))
IDS = list(range(4 * BLOCK_TOKENS))
NAMES = block_hashes(IDS, BLOCK_TOKENS, fingerprint="f", salt="")


def session(name: str = "n", incarnation: str = "one", *, kv_events: bool = True) -> NodeSession:
    model = ModelInfo("m", {}, 1000, 256, 512)
    join = Join(name, incarnation, "local", Role.PREFILL, bytes(32), None, model, "1", 8, kv_events=kv_events)
    return NodeSession(join, 0.0)


async def asked(node: NodeSession) -> list[ToNode]:
    sent = []
    while (data := await node.next_outbound(0.0)) is not None:
        sent.append(decode_to_node(data))
    return sent


def stored(start: int, stop: int) -> BlockStored:
    return BlockStored(
        tuple(NAMES[start:stop]),
        NAMES[start - 1] if start else None,
        tuple(IDS[start * BLOCK_TOKENS : stop * BLOCK_TOKENS]),
        BLOCK_TOKENS,
        None,
        "CPU",
        None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def snapshot(block: int) -> BlockStored:
    return BlockStored(
        (NAMES[block],), None, (), BLOCK_TOKENS, None, "CPU", None, group_idx=1, kv_cache_spec_kind="mamba"
    )


def batch(*events: KvEvent, rank: int | None = None) -> bytes:
    return encode_batch(EventBatch(1.0, events, rank))


def held(index: KvIndex, node: str = "n") -> Held | None:
    return index.matches(NAMES, 0.0).get(node)


def tokens(blocks: int, resumable: int | None = None) -> Held:
    return Held(blocks * BLOCK_TOKENS, (blocks if resumable is None else resumable) * BLOCK_TOKENS)


async def test_a_node_is_asked_for_all_it_has_and_what_it_says_is_matched() -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    assert await asked(node) == [ReplayKvEvents(0)]
    assert held(index) is None
    index.heard(node, KvEvents(0, batch(stored(0, 3))))
    assert held(index) == tokens(3)
    index.heard(node, KvEvents(1, batch(BlockRemoved((NAMES[1],), "CPU", 0))))
    assert held(index) == tokens(1)
    assert await asked(node) == []
    assert (index.figures.batches, index.figures.events) == (2, 2)


async def test_a_hybrid_resumes_only_at_snapshots() -> None:
    index, node = KvIndex(HYBRID, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 4), snapshot(1), snapshot(2))))
    assert held(index) == tokens(4, 3)
    index.heard(node, KvEvents(1, batch(BlockRemoved((NAMES[2],), "CPU", 1))))
    assert held(index) == tokens(4, 2)


async def test_a_gap_is_asked_for_once_and_then_filled() -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 1))))
    await asked(node)
    index.heard(node, KvEvents(2, batch(stored(2, 3))))
    index.heard(node, KvEvents(3, batch(stored(3, 4))))
    assert await asked(node) == [ReplayKvEvents(1)]
    assert held(index) == tokens(1), "nothing is applied out of turn"
    for number in (1, 2, 3):
        index.heard(node, KvEvents(number, batch(stored(number, number + 1))))
    assert held(index) == tokens(4)
    index.heard(node, KvEvents(6, batch()))
    assert await asked(node) == [ReplayKvEvents(4)]
    assert index.figures.gaps == 2


async def test_what_a_node_tells_anew_replaces_what_it_told() -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 4))))
    index.heard(node, KvEvents(9, batch(AllBlocksCleared(), stored(0, 2))))
    assert held(index) == tokens(2)
    index.heard(node, KvEvents(10, batch(stored(2, 3))))
    assert held(index) == tokens(3)


async def test_what_never_comes_empties_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index._nodes["n"].sequence._max_waiting = 2
    index.heard(node, KvEvents(0, batch(stored(0, 4))))
    for number in (5, 6, 7):
        index.heard(node, KvEvents(number, batch(stored(0, 2))))
    assert held(index) == tokens(2)
    assert index.figures.rebuilds == 1


async def test_a_batch_that_is_none_empties_what_is_known() -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 4))))
    index.heard(node, KvEvents(1, b"\xff"))
    assert held(index) is None
    index.heard(node, KvEvents(-1, batch(stored(0, 4))))
    index.heard(node, KvEvents(1 << 63, batch(stored(0, 4))))
    assert held(index) is None
    assert index.figures.errors == 3


async def test_a_reconnect_goes_on_where_it_was_and_a_new_incarnation_begins_anew() -> None:
    index, first, again, other = KvIndex(FULL, "f"), session(), session(), session(incarnation="two")
    index.joined(first)
    index.heard(first, KvEvents(0, batch(stored(0, 2))))
    index.joined(again)
    index.lost(first, 5.0)
    assert await asked(again) == [ReplayKvEvents(1)]
    index.heard(first, KvEvents(1, batch(BlockRemoved((NAMES[0],), "CPU", 0))))
    assert held(index) == tokens(2), "the old stream says nothing any more"
    index.sweep(5.0 + KEEP_LOST_S)
    assert held(index) == tokens(2), "the new one is there"
    index.lost(again, 6.0)
    index.joined(other)
    assert await asked(other) == [ReplayKvEvents(0)]
    assert held(index) is None


async def test_a_node_that_stays_away_is_forgotten() -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 2))))
    index.lost(node, 10.0)
    index.sweep(10.0 + KEEP_LOST_S - 1)
    assert held(index) == tokens(2)
    index.sweep(10.0 + KEEP_LOST_S)
    assert held(index) is None
    assert index.workers() == {}


async def test_of_a_node_without_events_what_was_sent_there_is_a_guess() -> None:
    index, silent, telling = KvIndex(FULL, "f"), session("silent", kv_events=False), session("telling")
    for node in (silent, telling):
        index.joined(node)
        index.sent(node.node_id, NAMES[:2], 0.0)
    assert await asked(silent) == []
    two = 2 * BLOCK_TOKENS
    assert dict(index.matches(NAMES, 1.0)) == {"silent": Held(two, two, exact=False)}
    assert index.matches(NAMES, 1e6) == {}


async def test_an_engine_that_counts_other_tokens_switches_affinity_off() -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 2))))
    index.distrust()
    assert index.matches(NAMES, 0.0) == {}


def test_an_engines_ranks_are_caches_of_their_own_and_the_best_is_named() -> None:
    index = KvIndex(FULL, "f")
    one, two = (index.engine(f"tcp://h:{port}", "n") for port in (1, 2))
    index.engine_said(one, 0, batch(BlockStored((1,), None, tuple(IDS[:64]), 64, None, "GPU", None), rank=0), live=True)
    index.engine_said(
        two, 0, batch(BlockStored((1, 2), None, tuple(IDS[:128]), 64, None, "GPU", None), rank=1), live=True
    )
    assert held(index) == Held(128, 128, exact=True, dp_rank=1)
    index.engine_said(two, 1, batch(AllBlocksCleared(), rank=1), live=True)
    assert held(index) == Held(64, 64)


async def test_a_node_that_joins_without_events_keeps_what_its_engine_says() -> None:
    index = KvIndex(FULL, "f")
    index.engine_said(index.engine("tcp://h:1", "n"), 0, engine_batch(2, 0), live=True)
    index.joined(session(kv_events=False))
    assert held(index) == tokens(2)


def engine_batch(blocks: int, name: int) -> bytes:
    ids = tuple(IDS[: blocks * 64])
    return encode_batch(
        EventBatch(float(name), (BlockStored(tuple(range(name, name + blocks)), None, ids, 64, None, "GPU", None),))
    )


@pytest.mark.parametrize("live_before", [True, False])
def test_an_engine_that_counts_anew_holds_nothing_of_before(live_before: bool) -> None:
    index = KvIndex(FULL, "f")
    source = index.engine("tcp://h:1", "n")
    for number in range(4):
        index.engine_said(source, number, engine_batch(4, 100 * number), live=live_before)
    index.engine_said(source, 3, engine_batch(4, 300), live=not live_before)
    assert held(index) == tokens(4), "the same bytes again are the same batch"
    index.engine_said(source, 0, engine_batch(1, 7), live=True)
    assert held(index) == tokens(1)
    index.engine_said(source, 1, engine_batch(2, 9), live=True)
    assert held(index) == tokens(2)


def test_an_engine_that_counts_anew_within_a_gap_holds_nothing_of_before() -> None:
    index = KvIndex(FULL, "f")
    source = index.engine("tcp://h:1", "n")
    index.engine_said(source, 0, engine_batch(4, 0), live=True)
    index.engine_said(source, 50, engine_batch(4, 0), live=True)
    index.engine_said(source, 1, engine_batch(2, 70), live=True)
    assert held(index) is None
    assert source.sequence.missing == 0


def test_what_an_engine_cannot_replay_is_given_up() -> None:
    index = KvIndex(FULL, "f")
    source = index.engine("tcp://h:1", "n")
    index.engine_said(source, 0, engine_batch(4, 0), live=True)
    index.engine_said(source, 5, engine_batch(2, 50), live=True)
    assert held(index) == tokens(4)
    index.engine_gave_all(source)
    assert held(index) == tokens(2)
    assert index.figures.rebuilds == 1
    index.engine_gave_all(source)
    assert index.figures.rebuilds == 1


async def test_what_is_known_of_nodes_outlives_a_restart_and_goes_on_from_there() -> None:
    index, node, other = KvIndex(FULL, "f"), session(), session("other")
    for one in (node, other):
        index.joined(one)
        index.heard(one, KvEvents(0, batch(stored(0, 2))))
    again = KvIndex(FULL, "f")
    again.restore(index.dump(5.0), 100.0)
    assert dict(again.matches(NAMES, 100.0)) == {"n": tokens(2), "other": tokens(2)}
    back, elsewhere = session(), session("other", "two")
    again.joined(back)
    again.joined(elsewhere)
    assert await asked(back) == [ReplayKvEvents(1)]
    assert await asked(elsewhere) == [ReplayKvEvents(0)]
    again.heard(back, KvEvents(1, batch(stored(2, 3))))
    assert dict(again.matches(NAMES, 100.0)) == {"n": tokens(3)}
    with pytest.raises(SnapshotError):
        KvIndex(FULL, "another model").restore(index.dump(5.0), 0.0)


def test_what_is_known_of_engines_outlives_a_restart_with_their_names() -> None:
    index = KvIndex(FULL, "f")
    index.engine_said(index.engine("tcp://h:1", "n"), 7, engine_batch(3, 0), live=True)
    index.engine_gave_all(index.engine("tcp://h:1", "n"))
    again = KvIndex(FULL, "f")
    again.restore(index.dump(5.0), 100.0)
    assert held(again) == tokens(3)
    source = again.engine("tcp://h:1", "n")
    assert again.engine_knows(source, 7, engine_batch(3, 0))
    assert not again.engine_knows(source, 7, engine_batch(3, 1))
    assert not again.engine_knows(source, 8, engine_batch(3, 0))
    again.engine_said(source, 8, encode_batch(EventBatch(1.0, (BlockRemoved((1,), "GPU"),))), live=True)
    assert held(again) == tokens(1), "the engine's own names still mean something"


async def test_a_restored_node_that_does_not_come_back_is_forgotten() -> None:
    index, node = KvIndex(FULL, "f"), session()
    index.joined(node)
    index.heard(node, KvEvents(0, batch(stored(0, 2))))
    again = KvIndex(FULL, "f")
    again.restore(index.dump(5.0), 100.0)
    again.sweep(100.0 + KEEP_LOST_S)
    assert held(again) is None
