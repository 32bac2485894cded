"""What a job's request computes that its node may want to keep: copied while its blocks hold it, written when told.

A window has moved on one step later, and a request's blocks are gone soon after its end, so an offer is a copy of its
own. It is dropped with its job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engines.protocol import Checkpoint
from engines.vllm.blocks import LayerBlocks
from engines.vllm.mapping import Place
from engines.vllm.memory import PoolMemory
from engines.vllm.steps import Blocks
from kvcache.blocks import PageGeometry
from kvcache.layout import GroupKind
from kvcache.plan import Piece

Rows = tuple[int, tuple[Tensor, Tensor]]
"""The first token of copied K and V, and the copies."""


@dataclass(slots=True)
class Offer:
    """Blocks [start, stop), and with ``snapshot`` the windows at ``stop``, layer by layer as they are computed."""

    checkpoint: Checkpoint
    rows: dict[Place, Rows] = field(default_factory=dict)

    def take(self, geometry: PageGeometry, layer: LayerBlocks, ids: Blocks) -> None:
        """Copy what one layer has of it. Raises BlockLost."""
        place, stop = layer.place, self.checkpoint.stop
        group = geometry.layout.groups[place.g]
        if group.kind is GroupKind.FULL:
            start = self.checkpoint.start
        elif self.checkpoint.snapshot:
            start = group.first_token(stop)
        else:
            return
        if start < stop and place.shard.exports:
            self.rows[place] = start, layer.tokens(ids[place.blocks], start, stop)

    def write(self, geometry: PageGeometry, memory: PoolMemory, pages: Sequence[int]) -> None:
        """Fill ``pages``. Raises ValueError where they are not as many as this takes."""
        begin, stop = self.checkpoint.start, self.checkpoint.stop
        table = (geometry if self.checkpoint.snapshot else geometry.blocks_only).table(begin, stop, pages)
        for place, (start, rows) in self.rows.items():
            specs = geometry.layout.groups[place.g].layers[place.n].tensors
            for t, (spec, tensor) in enumerate(zip(specs, rows, strict=True)):
                extents = table.extents(Piece(0, place.g, place.n, t, start, stop, 0, spec.nbytes * (stop - start)))
                memory.write(extents, spec, place.shard, tensor)


class Offering:
    """The offers of one job: at its checkpoints, and at its end.

    ``waiting`` are complete and await the node's word, by their ``stop``.
    """

    def __init__(self, geometry: PageGeometry, checkpoints: Sequence[Checkpoint], keep_from: int | None) -> None:
        self._geometry = geometry
        self._ahead = list(checkpoints)
        self._keep_from = keep_from
        self._open: list[Offer] = []
        self._last: Offer | None = None
        self.waiting: dict[int, Offer] = {}

    def begin_step(self, begin: int, end: int) -> None:
        """Tokens [begin, end) are being computed: see what is to be copied of them. A request may begin anew."""
        self._open = [Offer(each) for each in self._ahead if begin < each.stop <= end]
        self._ahead = [each for each in self._ahead if each.stop > end]
        boundary = end // self._geometry.block_tokens * self._geometry.block_tokens
        if self._keep_from is not None and boundary > max(begin, self._keep_from):
            self._last = Offer(Checkpoint(boundary, boundary))
            self._open.append(self._last)

    def save(self, layer: LayerBlocks, ids: Blocks) -> None:
        """Copy what the offers of this step need of one layer. Raises BlockLost."""
        for offer in self._open:
            offer.take(self._geometry, layer, ids)

    def end_step(self) -> list[Checkpoint]:
        """What can be offered now."""
        done = [offer for offer in self._open if offer is not self._last]
        self._open = []
        self.waiting |= {offer.checkpoint.stop: offer for offer in done}
        return [offer.checkpoint for offer in done]

    def end(self, layers: Iterable[LayerBlocks], ids: Blocks, tokens: int) -> Checkpoint | None:
        """The request is over, ``tokens`` of it are in its blocks: the node's blocks that it filled, and their end.

        None where it filled none. Raises BlockLost.
        """
        size = self._geometry.block_tokens
        start, stop, last = self._keep_from, tokens // size * size, self._last
        if start is None or stop <= start or last is None or last.checkpoint.stop != stop:
            return None
        offer = Offer(Checkpoint(start, stop), dict(last.rows))
        for layer in layers:
            if self._geometry.layout.groups[layer.place.g].kind is GroupKind.FULL:
                offer.take(self._geometry, layer, ids)
        self.waiting[stop] = offer
        return offer.checkpoint
