"""How many raw bytes a transfer takes, without planning its pieces."""

from __future__ import annotations

from kvcache.layout import GroupKind, KVLayout
from scheduler.facts import SizeFacts


def size_facts(layout: KVLayout) -> SizeFacts:
    """What the sizes of a layout's transfers follow from."""
    per_token = state = 0
    windows = []
    for group in layout.groups:
        nbytes = sum(layer.nbytes for layer in group.layers)
        if group.kind is GroupKind.FULL:
            per_token += nbytes
        elif group.window is not None:
            windows.append((group.window - 1, nbytes))
        else:
            state += nbytes
    return SizeFacts(per_token, tuple(windows), state)


def transfer_bytes(sizes: SizeFacts, start: int, stop: int) -> int:
    """Raw bytes of a transfer of tokens [start, stop): full attention by the increment, windows and states whole.

    Equals ``plan_transfer(...).nbytes``; 0 for an empty range. Raises ValueError where start > stop or start < 0.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"a range needs 0 <= start <= stop, got [{start}, {stop})")
    if start == stop:
        return 0
    total = sizes.per_token * (stop - start) + sizes.state
    for held, nbytes in sizes.windows:
        total += nbytes * (held if held < stop else stop)
    return total


def kept_bytes(sizes: SizeFacts, tokens: int, end: bool) -> int:
    """Raw bytes of full attention of ``tokens`` kept tokens and, with ``end``, of whole windows and states."""
    ends = sizes.state + sum(held * nbytes for held, nbytes in sizes.windows)
    return sizes.per_token * tokens + (ends if end else 0)


def last_chunk(sizes: SizeFacts, start: int, stop: int, chunk_tokens: int) -> tuple[int, int]:
    """Tokens of the last chunk of [start, stop) on the absolute grid, and the raw bytes that are final only with it.

    These are what the plan of the transfer releases last: the chunk's own full attention, all windows and states.
    Raises ValueError as ``transfer_bytes`` does, and for a grid of nothing.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    if start >= stop:
        return 0, transfer_bytes(sizes, start, stop)
    begins = max(start, (stop - 1) // chunk_tokens * chunk_tokens)
    return stop - begins, transfer_bytes(sizes, begins, stop)
