"""Our cache layers against transformers' own, and the way of their bytes through pages."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from engines.embedded.cache import StateLayer, TokenLayer, empty_cache, state_layer, token_layer
from engines.embedded.pages import Export, PageMemory, load
from engines.embedded.ragged import join
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from tests.engines.harness import Room

KEY, VALUE = TensorSpec("k", DType.FLOAT32, (2, 8)), TensorSpec("v", DType.FLOAT32, (2, 6))
CONV, RECURRENT = TensorSpec("conv", DType.BFLOAT16, (5, 3)), TensorSpec("recurrent", DType.FLOAT32, (3, 70, 90))


def random_kv(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 6)


@pytest.mark.parametrize("window", [None, 2, 16, 100, 300])
@pytest.mark.parametrize("steps", [[1] * 350, [64] * 6, [256, 256, 40, *[1] * 330], [1, 2, 500, 3, 1]])
def test_a_token_layer_shows_what_the_layer_of_transformers_shows(window: int | None, steps: list[int]) -> None:
    ours = TokenLayer(KEY, VALUE, window)
    theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    for count in steps:
        assert ours.get_mask_sizes(count) == theirs.get_mask_sizes(count)
        key, value = random_kv(count)
        for mine, other in zip(ours.update(key, value), theirs.update(key, value), strict=True):
            assert torch.equal(mine, other)
        assert ours.get_seq_length() == theirs.get_seq_length()
        stop = ours.length
        start = 0 if window is None else max(0, stop - (window - 1))
        assert torch.equal(ours.tokens(0, start, stop), theirs.keys[0].transpose(0, 1))


def test_a_window_keeps_its_buffer_small() -> None:
    layer = TokenLayer(KEY, VALUE, 16)
    for _ in range(1000):
        layer.update(*random_kv(1))
    assert layer.tokens(0, 985, 1000).untyped_storage().nbytes() < 64 * KEY.nbytes


def layout() -> KVLayout:
    """All three kinds, two of them side by side in layer 2; states wider than a page."""
    return KVLayout(
        (
            GroupSpec(GroupKind.FULL, (LayerSpec(1, (KEY, VALUE)), LayerSpec(2, (KEY, VALUE)))),
            GroupSpec(GroupKind.SLIDING, (LayerSpec(0, (KEY, VALUE)), LayerSpec(3, (KEY, VALUE))), 50),
            GroupSpec(GroupKind.STATE, (LayerSpec(2, (CONV, RECURRENT)),)),
        )
    )


@pytest.mark.parametrize("stop", [1, 49, 50, 64, 130, 300])
def test_bytes_that_were_loaded_are_exported_again_unchanged(stop: int) -> None:
    room = Room.create(layout(), pages=200)
    memory = PageMemory(room.pool)
    plan = room.plan(stop, chunk_tokens=512)
    first, second = room.table("first", stop), room.table("second", stop)
    pieces = [bytes(torch.randint(0, 256, (piece.nbytes,), dtype=torch.uint8).tolist()) for piece in plan.pieces]
    room.fill(first, plan, pieces)
    cache = empty_cache(layout(), 10)
    load(cache, first, memory)
    assert cache.get_seq_length() == stop
    seen: list[int] = []
    export = Export(plan, second, memory, seen.append)
    for index in range(4):
        assert not export.complete
        export.after_layer(cache, index, stop)
    assert export.complete
    assert room.pieces(second, plan) == pieces
    assert seen == [2, 4, 8, 10]
    del memory
    room.pool.close()


def test_a_piece_is_reported_only_when_its_bytes_lie_in_the_pool() -> None:
    room = Room.create(layout(), pages=200)
    memory = PageMemory(room.pool)
    plan, stop = room.plan(130, chunk_tokens=512), 130
    first, second = room.table("first", stop), room.table("second", stop)
    pieces = [bytes([piece.seq + 1]) * piece.nbytes for piece in plan.pieces]
    room.fill(first, plan, pieces)
    cache = empty_cache(layout(), 10)
    load(cache, first, memory)

    def reported(count: int) -> None:
        assert room.pieces(second, plan)[:count] == pieces[:count]

    export = Export(plan, second, memory, reported)
    for index in range(4):
        export.after_layer(cache, index, stop)
    assert export.complete
    del memory
    room.pool.close()


def test_a_layer_with_both_kinds_joins_both_and_gives_both_back() -> None:
    held = KVLayout(
        (
            GroupSpec(GroupKind.FULL, (LayerSpec(0, (KEY, VALUE)),)),
            GroupSpec(GroupKind.STATE, (LayerSpec(0, (CONV, RECURRENT)),)),
        )
    )
    caches = [empty_cache(held, 0) for _ in range(2)]
    caches[1].update(*random_kv(30), 0)
    batch = join(caches)
    assert batch.has_previous_state(0)
    assert batch.get_mask_sizes(1, 0) == (1, 0)
    key = torch.randn(2, 2, 1, 8)
    keys, _ = batch.update(key, torch.randn(2, 2, 1, 6), 0)
    assert [k.shape[2] for k in keys] == [1, 31]
    assert torch.equal(token_layer(caches[1], 0).tokens(0, 30, 31)[0], key[1, :, 0])
    state_layer(batch, 0).state(1).copy_(torch.arange(2.0).view(2, 1, 1, 1).expand(2, *RECURRENT.shape))
    assert [float(state_layer(cache, 0).state(1).max()) for cache in caches] == [0.0, 1.0]
    assert [cache.get_seq_length() for cache in caches] == [1, 31]


def test_joined_states_belong_to_their_requests_after_the_batch_is_gone() -> None:
    one_layer = KVLayout((GroupSpec(GroupKind.STATE, (LayerSpec(0, (CONV, RECURRENT)),)),))
    caches = [empty_cache(one_layer, 0) for _ in range(3)]
    batch = join(caches)
    assert isinstance(batch.layers[0], StateLayer)
    batch.layers[0].state(1).copy_(torch.arange(3.0).view(3, 1, 1, 1).expand(3, *RECURRENT.shape))
    again = join([caches[2], caches[0]])
    assert isinstance(again.layers[0], StateLayer)
    assert again.layers[0].state(1)[:, 0, 0, 0].tolist() == [2.0, 0.0]
    again.layers[0].state(1).add_(1)
    rows = [cache.layers[0] for cache in caches]
    assert [float(row.state(1).max()) for row in rows if isinstance(row, StateLayer)] == [1.0, 1.0, 3.0]
