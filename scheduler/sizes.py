"""How many raw bytes a transfer takes, without planning its pieces."""

from __future__ import annotations

from kvcache.layout import GroupKind, KVLayout


def last_chunk(layout: KVLayout, start: int, stop: int, chunk_tokens: int) -> tuple[int, int]:
    """Tokens of the last chunk of [start, stop) on the absolute grid, and the raw bytes that are final only with it.

    These are what the plan of the transfer releases last: the chunk's own full attention, all windows and states.
    Raises ValueError as ``transfer_bytes`` does, and for a grid of nothing.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    if start >= stop:
        return 0, transfer_bytes(layout, start, stop)
    begins = max(start, (stop - 1) // chunk_tokens * chunk_tokens)
    return stop - begins, transfer_bytes(layout, begins, stop)


def transfer_bytes(layout: KVLayout, start: int, stop: int) -> int:
    """Raw bytes of a transfer of tokens [start, stop): full attention by the increment, windows and states whole.

    Equals ``plan_transfer(...).nbytes``; 0 for an empty range. Raises ValueError where start > stop or start < 0.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"a range needs 0 <= start <= stop, got [{start}, {stop})")
    if start == stop:
        return 0
    total = 0
    for group in layout.groups:
        if group.kind is GroupKind.FULL:
            held = stop - start
        elif group.kind is GroupKind.SLIDING:
            held = stop - group.first_token(stop)
        else:
            held = 1
        total += held * sum(layer.nbytes for layer in group.layers)
    return total
