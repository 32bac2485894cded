"""One job's way from vLLM's blocks into the pool: after each layer of each step, what became final is copied.

Pieces become ready in the order in which layers and steps come; the plan's order is what is told. Where vLLM's steps
end off the plan's grid, a piece is ready when its last token is.
"""

from __future__ import annotations

from engines.vllm.blocks import LayerBlocks
from engines.vllm.memory import PoolMemory
from engines.vllm.steps import Blocks
from kvcache.blocks import PageTable
from kvcache.layout import GroupKind
from kvcache.plan import Piece, TransferPlan


class Export:
    """Writes the pieces of ``plan`` into ``table``, each once.

    What a request computes anew, after it was preempted, is not written again: the bytes may be on their way already.
    """

    def __init__(self, plan: TransferPlan, table: PageTable, memory: PoolMemory, held: int) -> None:
        """Blocks below token ``held`` lie in the pool already and are not written."""
        self._plan = plan
        self._table = table
        self._memory = memory
        self._exported: dict[tuple[int, int], int] = {}
        self._first = max(plan.start, held)
        self.ready = 0
        """How many pieces of the plan lie in the pool, with all before them."""

    @property
    def complete(self) -> bool:
        """Every piece lies in the pool."""
        return self.ready == len(self._plan.pieces)

    @property
    def tokens(self) -> int:
        """Tokens of which every full-attention layer's pieces lie in the pool."""
        layers = self._layers_of(GroupKind.FULL)
        return min((self._exported.get(layer, self._first) for layer in layers), default=self._first)

    def save(self, layer: LayerBlocks, ids: Blocks, end: int) -> None:
        """Copy what of a layer is final now that tokens below ``end`` are computed. Raises BlockLost."""
        place, stop = layer.place, self._plan.stop
        key, group = (place.g, place.n), self._plan.layout.groups[place.g]
        if group.kind is GroupKind.FULL:
            start, end = self._exported.get(key, self._first), min(end, stop)
        else:
            start, end = group.first_token(stop), stop if end >= stop else 0
        if start < end:
            if place.shard.exports:
                copy_out(layer, ids[place.blocks], self._table, self._memory, start, end)
            self._exported[key] = end

    def advance(self) -> bool:
        """Count the pieces that have become ready; whether there are more than before."""
        before, pieces = self.ready, self._plan.pieces
        while self.ready < len(pieces) and self._is_ready(pieces[self.ready]):
            self.ready += 1
        return self.ready > before

    def bytes_between(self, first: int, stop: int) -> int:
        """Bytes of the pieces [first, stop)."""
        return sum(piece.nbytes for piece in self._plan.pieces[first:stop])

    def _is_ready(self, piece: Piece) -> bool:
        full = self._plan.layout.groups[piece.group].kind is GroupKind.FULL
        return self._exported.get((piece.group, piece.layer), self._first if full else 0) >= piece.stop

    def _layers_of(self, kind: GroupKind) -> list[tuple[int, int]]:
        groups = enumerate(self._plan.layout.groups)
        return [(g, n) for g, group in groups if group.kind is kind for n in range(len(group.layers))]


def copy_out(layer: LayerBlocks, ids: list[int], table: PageTable, memory: PoolMemory, start: int, stop: int) -> None:
    """Copy tokens [start, stop) of one layer into the pages of ``table``. Raises BlockLost."""
    place = layer.place
    specs = table.geometry.layout.groups[place.g].layers[place.n].tensors
    for t, (spec, rows) in enumerate(zip(specs, layer.tokens(ids, start, stop), strict=True)):
        extents = table.extents(Piece(0, place.g, place.n, t, start, stop, 0, spec.nbytes * (stop - start)))
        memory.write(extents, spec, place.shard, rows)


def copy_in(layer: LayerBlocks, ids: list[int], table: PageTable, memory: PoolMemory, begin: int) -> None:
    """Fill a request's own blocks, those from token ``begin`` on, with what ``table`` holds of a layer.

    Raises BlockLost.
    """
    place, stop = layer.place, table.stop
    group = table.geometry.layout.groups[place.g]
    start = max(begin, group.first_token(stop))
    rows = []
    for t, spec in enumerate(group.layers[place.n].tensors):
        extents = table.extents(Piece(0, place.g, place.n, t, start, stop, 0, spec.nbytes * (stop - start)))
        rows.append(memory.read(extents, spec, place.shard))
    layer.fill(ids, begin, start, stop, *rows)
