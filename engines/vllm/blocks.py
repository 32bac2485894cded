"""Tokens of one layer in vLLM's blocks: read by position, and written with nothing else left in the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.vllm.mapping import Place
from engines.vllm.packing import Packing

NULL_BLOCK = 0
"""What vLLM puts into a request's list where a window has moved on: a block that belongs to nobody."""


class BlockLost(Exception):
    """A block whose tokens are needed is not the request's any more."""


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """One layer's paged cache. ``ids`` in its methods are a request's block ids in the layer's group, by position."""

    place: Place
    cache: Tensor
    packing: Packing

    def tokens(self, ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens [start, stop), each (tokens, heads, dim). Raises BlockLost."""
        size = self.place.block_tokens
        first, last = start // size, (stop - 1) // size
        blocks = list(ids[first : last + 1])
        if len(blocks) <= last - first or NULL_BLOCK in blocks:
            raise BlockLost(f"layer {self.place.name}: tokens [{start}, {stop}) are not all in the request's blocks")
        return self.packing.gather(self.cache, blocks, start - first * size, stop - start)

    def fill(self, ids: Sequence[int], begin: int, start: int, stop: int, k: Tensor, v: Tensor) -> None:
        """Write tokens [start, stop), and zeros into all else of the request's blocks from token ``begin`` on.

        ``begin`` is where the blocks begin that are this request's alone: those before are shared with others.
        Raises BlockLost where a token has no block.
        """
        size = self.place.block_tokens
        if len(ids) * size < stop:
            raise BlockLost(f"layer {self.place.name}: {len(ids)} blocks for {stop} tokens")
        used = range(start // size, -(-stop // size))
        if NULL_BLOCK in ids[used.start : used.stop]:
            raise BlockLost(f"layer {self.place.name}: tokens [{start}, {stop}) have no block")
        whole = range(-(-start // size), stop // size)
        if whole:
            part = slice(whole.start * size - start, whole.stop * size - start)
            self.packing.scatter_whole(self.cache, ids[whole.start : whole.stop], k[part], v[part])
        for at in range(begin // size, len(ids)):
            if at in whole or ids[at] == NULL_BLOCK:
                continue
            low = max(start, at * size)
            part = slice(low - start, max(low, min(stop, (at + 1) * size)) - start)
            self.packing.scatter(self.cache, ids[at], low - at * size if at in used else 0, k[part], v[part])
