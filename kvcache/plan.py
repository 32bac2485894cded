"""The pieces of one transfer, in the order in which a prefill releases them.

Both ends derive the same plan from the layout and the ticket's range, so a piece's place in it (``seq``) names its
tensor, its tokens and its size: a peer's bytes choose none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcache.layout import GroupKind, KVLayout, TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's bytes for one stretch of tokens: what a Data frame carries.

    ``layer`` counts inside its group. ``[start, stop)`` are absolute token positions; a STATE piece is valid at exactly
    ``stop`` and has ``start == stop``. ``chunk`` is the ordinal of the prefill chunk whose completion releases it.
    """

    seq: int
    group: int
    layer: int
    tensor: int
    start: int
    stop: int
    chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Every piece of the cache for tokens [start, stop): full attention by the increment, windows and states whole."""

    layout: KVLayout
    start: int
    stop: int
    chunk_tokens: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Raw bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def tensor(self, piece: Piece) -> TensorSpec:
        """The layout's entry for a piece."""
        return self.layout.groups[piece.group].layers[piece.layer].tensors[piece.tensor]

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """The piece's shape in canonical order: (tokens, heads, dim), or the state's own."""
        spec = self.tensor(piece)
        if self.layout.groups[piece.group].kind is GroupKind.STATE:
            return spec.shape
        return (piece.stop - piece.start, *spec.shape)


def chunk_bounds(start: int, stop: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """Split [start, stop) on the absolute grid of ``chunk_tokens``: where a chunk ends never depends on the start."""
    while start < stop:
        end = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        yield start, end
        start = end


def plan_transfer(layout: KVLayout, start: int, stop: int, chunk_tokens: int) -> TransferPlan:
    """Plan the transfer of tokens [start, stop).

    Release order: chunk by chunk and, inside one, model layer by model layer; windows and states join their layers in
    the last chunk, because only then are they final. Raises ValueError for an empty range or grid.
    """
    if not 0 <= start < stop:
        raise ValueError(f"a transfer covers at least one token, got [{start}, {stop})")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    by_model_layer = sorted(
        (layer.index, g, n) for g, group in enumerate(layout.groups) for n, layer in enumerate(group.layers)
    )
    pieces: list[Piece] = []
    for chunk, (lo, hi) in enumerate(chunk_bounds(start, stop, chunk_tokens)):
        for _, g, n in by_model_layer:
            group = layout.groups[g]
            if group.kind is GroupKind.FULL:
                ranges = [(lo, hi)]
            elif hi < stop:
                ranges = []
            elif group.kind is GroupKind.SLIDING:
                ranges = list(chunk_bounds(group.first_token(stop), stop, chunk_tokens))
            else:
                ranges = [(stop, stop)]
            for t, spec in enumerate(group.layers[n].tensors):
                for a, b in ranges:
                    nbytes = spec.nbytes * (1 if group.kind is GroupKind.STATE else b - a)
                    pieces.append(Piece(len(pieces), g, n, t, a, b, chunk, nbytes))
    return TransferPlan(layout, start, stop, chunk_tokens, tuple(pieces))
