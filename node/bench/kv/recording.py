"""KV that was computed once and can be exported again, as often and for as many tokens as a measurement wants."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.blocks import PageTable
from kvcache.digest import kv_digest, piece_digest
from kvcache.hostpool import HostPool
from kvcache.layout import GroupKind, KVLayout
from kvcache.plan import Piece, TransferPlan

CHUNK_TOKENS = 256

Place = tuple[int, int, int]
"""Group, layer and tensor, as a piece names them."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Every tensor's bytes, token after token. A longer cache than the recorded one repeats it."""

    layout: KVLayout
    tensors: dict[Place, memoryview]

    @classmethod
    def of(cls, plan: TransferPlan, table: PageTable, pool: HostPool) -> Recording:
        """Copy a whole cache out of pool pages."""
        parts: dict[Place, bytearray] = {}
        for piece in plan.pieces:
            tensor = parts.setdefault(_place(piece), bytearray())
            for view in pool.views(table.extents(piece)):
                tensor += view
        return cls(plan.layout, {place: memoryview(part).toreadonly() for place, part in parts.items()})

    def write(self, plan: TransferPlan, table: PageTable, pool: HostPool) -> None:
        """Lay the cache that ``plan`` describes into pool pages."""
        for piece in plan.pieces:
            tensor = self.tensors[_place(piece)]
            state = plan.layout.groups[piece.group].kind is GroupKind.STATE
            at = 0 if state else piece.start * plan.tensor(piece).nbytes % len(tensor)
            for view in pool.views(table.extents(piece)):
                at = _fill(view, tensor, at)


def digest_of(plan: TransferPlan, table: PageTable, pool: HostPool) -> bytes:
    """What a transfer's ``kv_digest`` is where every byte of these pages has arrived."""
    return kv_digest(b"".join(piece_digest(pool.views(table.extents(piece))) for piece in plan.pieces))


def tokens_within(layout: KVLayout, nbytes: int) -> int:
    """The longest prompt whose cache takes at most ``nbytes``. Raises ValueError where not even one token's does."""
    if layout.s_kv(1) > nbytes:
        raise ValueError(f"{nbytes} bytes: the cache of one token takes {layout.s_kv(1)} already")
    low, high = 1, 2
    while layout.s_kv(high) <= nbytes:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if layout.s_kv(middle) <= nbytes else (low, middle)
    return low


def _place(piece: Piece) -> Place:
    return piece.group, piece.layer, piece.tensor


def _fill(view: memoryview, tensor: memoryview, at: int) -> int:
    """Fill ``view`` from ``tensor`` from ``at`` on, beginning again at its end; returns where to go on."""
    done = 0
    while done < len(view):
        count = min(len(view) - done, len(tensor) - at)
        view[done : done + count] = tensor[at : at + count]
        done += count
        at = (at + count) % len(tensor)
    return at
