"""How vLLM's attention kernels lay K and V out inside a block, and the way to and from canonical (token, head, dim).

A layer's cache is one tensor (blocks, heads, block_tokens, K dim + V dim) whose nominal shape misleads: per block and
head, all of K comes before all of V, and in the packing called "vec" K lies transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class UnknownPacking(ValueError):
    """A packing that is not known, or not as it was believed to be."""


class Packing(Protocol):
    """One kernel's layout of blocks. ``cache`` is the paged tensor of one layer, of which views are made."""

    def gather(self, cache: Tensor, blocks: Sequence[int], first: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V, each (count, heads, dim) and contiguous, of ``count`` tokens from ``first`` on in these blocks."""

    def scatter(self, cache: Tensor, block: int, first: int, k: Tensor, v: Tensor) -> None:
        """Fill one whole block: K and V (count, heads, dim) from its token ``first`` on, and zeros everywhere else."""

    def scatter_whole(self, cache: Tensor, blocks: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Fill whole blocks with K and V (tokens of all of them, heads, dim)."""


@dataclass(frozen=True, slots=True)
class TransposedKeys:
    """Per block and head K as (dim, token), then V as (token, dim): vLLM's "vec" and "vec16" on CPU."""

    block_tokens: int
    k_dim: int
    v_dim: int

    def _parts(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """(blocks, heads, K dim, block tokens) and (blocks, heads, block tokens, V dim) views of a layer's cache."""
        flat = cache.view(cache.shape[0], cache.shape[1], self.block_tokens * (self.k_dim + self.v_dim))
        split = self.block_tokens * self.k_dim
        k = flat[..., :split].view(*flat.shape[:2], self.k_dim, self.block_tokens)
        return k, flat[..., split:].view(*flat.shape[:2], self.block_tokens, self.v_dim)

    def gather(self, cache: Tensor, blocks: Sequence[int], first: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V, each (count, heads, dim) and contiguous, of ``count`` tokens from ``first`` on in these blocks."""
        k_cache, v_cache = self._parts(cache)
        ids = torch.tensor(blocks)
        k = k_cache[ids].permute(0, 3, 1, 2).flatten(0, 1)[first : first + count]
        v = v_cache[ids].permute(0, 2, 1, 3).flatten(0, 1)[first : first + count]
        return k.contiguous(), v.contiguous()

    def scatter(self, cache: Tensor, block: int, first: int, k: Tensor, v: Tensor) -> None:
        """Fill one whole block: K and V (count, heads, dim) from its token ``first`` on, and zeros everywhere else."""
        stop = first + k.shape[0]
        k_block, v_block = (part[block] for part in self._parts(cache))
        k_block[..., :first].zero_()
        k_block[..., stop:].zero_()
        v_block[:, :first].zero_()
        v_block[:, stop:].zero_()
        k_block[..., first:stop].copy_(k.permute(1, 2, 0))
        v_block[:, first:stop].copy_(v.permute(1, 0, 2))

    def scatter_whole(self, cache: Tensor, blocks: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Fill whole blocks with K and V (tokens of all of them, heads, dim)."""
        k_cache, v_cache = self._parts(cache)
        ids = torch.tensor(blocks)
        k_cache[ids] = k.view(len(blocks), self.block_tokens, *k.shape[1:]).permute(0, 2, 3, 1)
        v_cache[ids] = v.view(len(blocks), self.block_tokens, *v.shape[1:]).permute(0, 2, 1, 3)


KNOWN = {"vec": TransposedKeys, "vec16": TransposedKeys}
Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""The kernel that writes K and V (tokens, heads, dim) into a cache at slots: (k, v, cache, slots)."""


def packing_by_name(name: str, block_tokens: int, k_dim: int, v_dim: int) -> Packing:
    """The packing that vLLM calls ``name``. Raises UnknownPacking."""
    kind = KNOWN.get(name)
    if kind is None:
        known = ", ".join(sorted(KNOWN))
        raise UnknownPacking(f"the attention kernel packs its KV cache as {name!r}; known packings are {known}")
    return kind(block_tokens, k_dim, v_dim)


def check_packing(packing: Packing, name: str, like: Tensor, k_dim: int, store: Store) -> None:
    """Have the kernel itself write two blocks like those of ``like`` and read them back our way, and the reverse.

    Raises UnknownPacking where K or V come out otherwise: a kernel's layout is no interface, and may change.
    """
    _, heads, tokens, both = like.shape
    count = tokens + tokens // 2 + 1
    make = torch.Generator().manual_seed(1)
    k = torch.randn((count, heads, k_dim), generator=make).to(like.dtype)
    v = torch.randn((count, heads, both - k_dim), generator=make).to(like.dtype)
    cache = torch.zeros((3, heads, tokens, both), dtype=like.dtype)
    slots = torch.arange(count)
    slots = torch.where(slots < tokens, slots + 2 * tokens, slots)
    store(k, v, cache, slots)
    found_k, found_v = packing.gather(cache, (2, 1), 0, count)
    ours = torch.zeros_like(cache)
    packing.scatter_whole(ours, (2,), k[:tokens], v[:tokens])
    packing.scatter(ours, 1, 0, k[tokens:], v[tokens:])
    if not (torch.equal(found_k, k) and torch.equal(found_v, v) and torch.equal(ours, cache)):
        raise UnknownPacking(f"the attention kernel's packing {name!r} is not what this connector knows by that name")
