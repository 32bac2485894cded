"""A request's blocks of one layer: what is missing is said, and nothing of another's stays in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.vllm.blocks import BlockLost, LayerBlocks
from engines.vllm.mapping import Place
from engines.vllm.packing import TransposedKeys
from engines.vllm.shards import Shard

SIZE = 4


@pytest.fixture
def layer() -> LayerBlocks:
    cache = torch.full((9, 1, SIZE, 4), float("nan"), dtype=torch.bfloat16)
    return LayerBlocks(Place("layer", 0, 0, 0, SIZE, Shard(0, 1)), cache, TransposedKeys(SIZE, 2, 2))


def rows(count: int) -> tuple[Tensor, Tensor]:
    k = torch.arange(1, 2 * count + 1).reshape(count, 1, 2).to(torch.bfloat16)
    return k, -k


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (0, 10), (2, 10), (5, 7), (4, 8), (11, 12)])
def test_what_is_filled_comes_back_and_the_rest_of_the_blocks_is_zero(
    layer: LayerBlocks, start: int, stop: int
) -> None:
    ids = [3, 7, 1, 5]
    k, v = rows(stop - start)
    layer.fill(ids, 0, start, stop, k, v)
    found = layer.tokens(ids, start, stop)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)
    everything = torch.cat(
        [part[i : i + 1] for part in layer.tokens(ids, 0, 16) for i in range(16) if not start <= i < stop]
    )
    assert not everything.any(), "blocks that were another's hold something still, or NaN"
    assert layer.cache[2].isnan().all(), "a block of nobody's was written"


def test_blocks_before_the_first_own_one_are_left_alone(layer: LayerBlocks) -> None:
    layer.fill([3, 7, 1], 4, 4, 11, *rows(7))
    assert layer.cache[3].isnan().all()


def test_a_window_that_has_moved_on_needs_no_block(layer: LayerBlocks) -> None:
    layer.fill([0, 7, 1], 0, 6, 11, *rows(5))
    assert layer.cache[0].isnan().all()
    with pytest.raises(BlockLost, match=r"tokens \[3, 6\) are not all"):
        layer.tokens([0, 7, 1], 3, 6)


@pytest.mark.parametrize("ids", [[0, 7, 1], [3, 0, 1], [3, 7]])
def test_a_token_without_a_block_is_said_before_anything_is_written(layer: LayerBlocks, ids: list[int]) -> None:
    with pytest.raises(BlockLost):
        layer.fill(ids, 0, 2, 11, *rows(9))
    assert layer.cache.isnan().all()
