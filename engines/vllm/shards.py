"""Which heads of a layer one tensor-parallel rank holds, and which of several that hold the same one exports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Heads [first, first + count) of a layer; ``exports`` is False where another rank exports the same ones."""

    first: int
    count: int
    exports: bool = True


def shard_of(heads: int, rank: int, ranks: int) -> Shard:
    """What ``rank`` of ``ranks`` holds of ``heads``: a part of them, or one of them that other ranks hold, too.

    Raises ValueError where one number is no multiple of the other.
    """
    if heads % ranks == 0:
        each = heads // ranks
        return Shard(rank * each, each)
    if ranks % heads == 0:
        copies = ranks // heads
        return Shard(rank // copies, 1, exports=rank % copies == 0)
    raise ValueError(f"{heads} KV heads cannot be split over {ranks} tensor-parallel ranks")
