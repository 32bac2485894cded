"""A cache laid into a host pool and cut as a transfer cuts it: a real model's, or one made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import PageGeometry, PageTable
from kvcache.codecs import CodecError, CodecSet
from kvcache.codecs.arrays import floats, host_words, words_of
from kvcache.hostpool import HostPool
from kvcache.layout import GroupKind, KVLayout
from kvcache.plan import Piece, TransferPlan, plan_transfer


@dataclass(frozen=True, slots=True)
class Captured:
    """The cache of the first ``plan.stop`` tokens; ``ids`` go on after them (none where it is made up)."""

    ids: tuple[int, ...]
    pool: HostPool
    table: PageTable
    plan: TransferPlan

    @classmethod
    def room(cls, layout: KVLayout, ids: Sequence[int], tokens: int, chunk_tokens: int) -> Captured:
        """Room for a cache of ``tokens`` tokens; ``close`` frees it."""
        geometry = PageGeometry.of(layout)
        count = geometry.pages_for(0, tokens)
        pool = HostPool.create(geometry.page_bytes, count)
        return cls(
            tuple(ids),
            pool,
            geometry.table(0, tokens, range(count)),
            plan_transfer(layout, 0, tokens, chunk_tokens),
        )

    def close(self) -> None:
        """Give the memory back."""
        self.pool.close()

    def pieces(self, kinds: Sequence[GroupKind]) -> list[Piece]:
        """The pieces of groups of these kinds."""
        return [piece for piece in self.plan.pieces if self.plan.layout.groups[piece.group].kind in kinds]

    def views(self, piece: Piece) -> list[memoryview]:
        """A piece's bytes where they lie."""
        return self.pool.views(self.table.extents(piece))

    def values(self, piece: Piece) -> NDArray[Any]:
        """A piece as fp32."""
        dtype = self.plan.tensor(piece).dtype
        found: NDArray[Any] = floats(host_words(memoryview(b"".join(self.views(piece))), dtype), dtype)
        return found

    def through(self, codecs: CodecSet, kinds: Sequence[GroupKind], into: Captured) -> float:
        """Send the groups of ``kinds`` through ``codecs`` into another room, the others as they are.

        Returns the largest error.
        """
        coded = set(self.pieces(kinds))
        worst = 0.0
        for piece in self.plan.pieces:
            raw = memoryview(b"".join(self.views(piece)))
            if piece in coded:
                dtype, shape, codec = self.plan.tensor(piece).dtype, self.plan.shape(piece), codecs.of(self.plan, piece)
                payload = memoryview(b"".join(codec.encode([raw], dtype, shape)))
                codec.decode(payload, into.views(piece), dtype, shape)
                worst = max(worst, float(np.abs(into.values(piece) - self.values(piece)).max()))
            else:
                _fill(into.views(piece), raw)
        return worst


def made_up(layout: KVLayout, tokens: int, chunk_tokens: int) -> Captured:
    """Gaussian values with means and scales that differ by channel, as keys have them; the same at every call."""
    made = Captured.room(layout, (), tokens, chunk_tokens)
    rng = np.random.default_rng(0)
    for piece in made.plan.pieces:
        shape = made.plan.shape(piece)
        channels = shape[1:] if len(shape) > 1 else shape
        values = (rng.standard_normal(shape) + rng.standard_normal(channels)) * np.exp2(rng.normal(0, 1, channels))
        words = words_of(values.astype(np.float32), made.plan.tensor(piece).dtype)
        _fill(made.views(piece), memoryview(words.tobytes()))
    return made


def carries(codecs: CodecSet, captured: Captured, kinds: Sequence[GroupKind]) -> bool:
    """Whether the codecs take every tensor of these groups."""
    try:
        return all(
            captured.plan.tensor(piece).dtype in codecs.of(captured.plan, piece).dtypes
            for piece in captured.pieces(kinds)
        )
    except CodecError:
        return False


def _fill(views: Sequence[memoryview], data: memoryview) -> None:
    done = 0
    for view in views:
        view[:] = data[done : done + view.nbytes]
        done += view.nbytes
    assert done == data.nbytes
