"""Blocks as CPU kernels pack them, against tensors written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.vllm.packing import TransposedKeys, UnknownPacking, check_packing, packing_by_name

HEADS, BLOCK, K_DIM, V_DIM = 2, 4, 3, 5


def kernel(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """One element after the other, as the "vec" kernel places them."""
    flat = cache.view(cache.shape[0], HEADS, -1)
    for row, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, BLOCK)
        for head in range(HEADS):
            for d in range(K_DIM):
                flat[block, head, d * BLOCK + at] = k[row, head, d]
            for d in range(V_DIM):
                flat[block, head, K_DIM * BLOCK + at * V_DIM + d] = v[row, head, d]


def token_major(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Another kernel: K lies as V does."""
    flat = cache.view(cache.shape[0], HEADS, -1)
    split = K_DIM * BLOCK
    for row, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, BLOCK)
        flat[block, :, at * K_DIM : (at + 1) * K_DIM] = k[row]
        flat[block, :, split + at * V_DIM : split + (at + 1) * V_DIM] = v[row]


@pytest.fixture
def cache() -> Tensor:
    return torch.zeros((6, HEADS, BLOCK, K_DIM + V_DIM), dtype=torch.bfloat16)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    count = 11
    k = torch.arange(count * HEADS * K_DIM).reshape(count, HEADS, K_DIM).to(torch.bfloat16)
    v = 128 + torch.arange(count * HEADS * V_DIM).reshape(count, HEADS, V_DIM).to(torch.bfloat16)
    return k, v


@pytest.mark.parametrize(("first", "count"), [(0, 11), (0, 1), (3, 2), (4, 4), (5, 6), (10, 1)])
def test_tokens_come_out_as_the_kernel_put_them_in(
    cache: Tensor, rows: tuple[Tensor, Tensor], first: int, count: int
) -> None:
    blocks = [5, 2, 3]
    slots = torch.tensor([blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(11)])
    kernel(*rows, cache, slots)
    used = blocks[first // BLOCK : (first + count - 1) // BLOCK + 1]
    k, v = TransposedKeys(BLOCK, K_DIM, V_DIM).gather(cache, used, first % BLOCK, count)
    assert torch.equal(k, rows[0][first : first + count])
    assert torch.equal(v, rows[1][first : first + count])
    assert k.is_contiguous()
    assert v.is_contiguous()


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 2), (3, 1), (0, 0)])
def test_a_block_is_filled_as_the_kernel_would_and_zero_elsewhere(
    cache: Tensor, rows: tuple[Tensor, Tensor], first: int, count: int
) -> None:
    cache[2] = float("nan")
    k, v = rows[0][:count], rows[1][:count]
    TransposedKeys(BLOCK, K_DIM, V_DIM).scatter(cache, 2, first, k, v)
    wanted = torch.zeros_like(cache)
    kernel(k, v, wanted, torch.arange(count) + 2 * BLOCK + first)
    assert torch.equal(cache, wanted)


def test_an_unknown_packing_is_refused_by_name() -> None:
    with pytest.raises(UnknownPacking, match=r"packs its KV cache as 'amx'; known packings are vec, vec16"):
        packing_by_name("amx", BLOCK, K_DIM, V_DIM)


def test_a_kernel_that_packs_otherwise_than_its_name_says_is_refused(cache: Tensor) -> None:
    packing = packing_by_name("vec", BLOCK, K_DIM, V_DIM)
    check_packing(packing, "vec", cache, K_DIM, kernel)
    with pytest.raises(UnknownPacking, match="'vec' is not what this connector knows"):
        check_packing(packing, "vec", cache, K_DIM, token_major)
