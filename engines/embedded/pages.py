"""Between cache layers and pool pages: bytes move as they are, in canonical order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from engines.embedded.cache import state_layer, token_layer
from kvcache.blocks import Extent, PageTable
from kvcache.hostpool import HostPool
from kvcache.layout import GroupKind
from kvcache.plan import Piece, TransferPlan

Bytes = npt.NDArray[np.uint8]


class PageMemory:
    """The host pool as one array of bytes."""

    def __init__(self, pool: HostPool) -> None:
        self._bytes: Bytes = np.frombuffer(pool.buffer, dtype=np.uint8)
        self._page_bytes = pool.page_bytes
        self.page_bytes = pool.page_bytes
        self.pages = pool.pages

    def write(self, extents: list[Extent], source: torch.Tensor) -> None:
        """Lay a tensor's bytes over ``extents``."""
        data = _as_bytes(source)
        at = 0
        for extent in extents:
            base = extent.page * self._page_bytes + extent.offset
            self._bytes[base : base + extent.nbytes] = data[at : at + extent.nbytes]
            at += extent.nbytes
        assert at == data.size, f"{data.size} bytes over extents of {at}"

    def read(self, extents: list[Extent], target: torch.Tensor) -> None:
        """Fill a contiguous tensor with the bytes in ``extents``."""
        data = _as_bytes(target)
        at = 0
        for extent in extents:
            base = extent.page * self._page_bytes + extent.offset
            data[at : at + extent.nbytes] = self._bytes[base : base + extent.nbytes]
            at += extent.nbytes
        assert at == data.size, f"{data.size} bytes from extents of {at}"


class Export:
    """One prefill's way into the pool: called after each layer of each chunk, it writes what became final."""

    def __init__(
        self, plan: TransferPlan, table: PageTable, memory: PageMemory, exported: Callable[[int], None], held: int = 0
    ) -> None:
        """``exported`` is told the cumulative number of pieces after every layer that released some.

        Blocks below token ``held``, less than the plan's stop, lie in the pool already and are not written.
        """
        self._held = held
        self._plan = plan
        self._table = table
        self._memory = memory
        self._exported = exported
        self._next = 0

    def begin(self) -> None:
        """Say which pieces lie in the pool already: those of the chunks below ``held``."""
        while self._held_already(self._plan.pieces[self._next]):
            self._next += 1
        if self._next:
            self._exported(self._next)

    def after_layer(self, cache: Cache, index: int, chunk_stop: int) -> None:
        """Write the pieces that model layer ``index`` released in the chunk that ended at ``chunk_stop``."""
        begin = self._next
        pieces = self._plan.pieces
        while self._next < len(pieces) and self._released(pieces[self._next], index, chunk_stop):
            piece = self._fresh(pieces[self._next])
            self._memory.write(self._table.extents(piece), _source(self._plan, cache, piece))
            self._next += 1
        if self._next > begin:
            self._exported(self._next)

    @property
    def complete(self) -> bool:
        """Every piece lies in the pool."""
        return self._next == len(self._plan.pieces)

    def _held_already(self, piece: Piece) -> bool:
        return self._is_full(piece) and piece.stop <= self._held

    def _fresh(self, piece: Piece) -> Piece:
        """What of a piece is to be written."""
        if self._is_full(piece) and piece.start < self._held:
            return replace(piece, start=self._held)
        return piece

    def _is_full(self, piece: Piece) -> bool:
        return self._plan.layout.groups[piece.group].kind is GroupKind.FULL

    def _released(self, piece: Piece, index: int, chunk_stop: int) -> bool:
        group = self._plan.layout.groups[piece.group]
        final = self._plan.stop if group.kind is not GroupKind.FULL else piece.stop
        return group.layers[piece.layer].index == index and final == chunk_stop


def load(cache: Cache, table: PageTable, memory: PageMemory) -> None:
    """Fill an empty cache with the tokens [0, stop) that lie in the pages of ``table``."""
    for g, group in enumerate(table.geometry.layout.groups):
        first, stop = group.first_token(table.stop), table.stop
        for n, layer in enumerate(group.layers):
            if group.kind is not GroupKind.STATE:
                token_layer(cache, layer.index).restore(first, stop)
            for t, spec in enumerate(layer.tensors):
                if group.kind is GroupKind.STATE:
                    target = state_layer(cache, layer.index).state(t)
                    piece = Piece(0, g, n, t, stop, stop, 0, spec.nbytes)
                else:
                    target = token_layer(cache, layer.index).tokens(t, first, stop)
                    piece = Piece(0, g, n, t, first, stop, 0, spec.nbytes * (stop - first))
                memory.read(table.extents(piece), target)


def _source(plan: TransferPlan, cache: Cache, piece: Piece) -> torch.Tensor:
    group = plan.layout.groups[piece.group]
    index = group.layers[piece.layer].index
    if group.kind is GroupKind.STATE:
        return state_layer(cache, index).state(piece.tensor)
    return token_layer(cache, index).tokens(piece.tensor, piece.start, piece.stop)


def _as_bytes(tensor: torch.Tensor) -> Bytes:
    assert tensor.is_contiguous(), "bytes are copied as they lie"
    data: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return data
