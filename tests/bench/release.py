"""The least exposed tail of a transfer: what a link without delays still has to carry when the last token is computed.

A prefill releases bytes chunk by chunk, windows and states only with the last. The link drains what was released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvcache.plan import TransferPlan


class Release(NamedTuple):
    """``nbytes`` may leave from ``at_s`` on, seconds after the prefill began."""

    at_s: float
    nbytes: float


def releases(plan: TransferPlan, prefill_s: float, wire_ratio: float) -> list[Release]:
    """One for each chunk, in order; tokens are taken to be computed at an even speed."""
    nbytes: Counter[int] = Counter()
    for piece in plan.pieces:
        nbytes[piece.chunk] += piece.nbytes
    first, found = plan.start // plan.chunk_tokens, []
    for chunk in range(max(nbytes) + 1):
        end = min(plan.stop, (first + chunk + 1) * plan.chunk_tokens)
        share = (end - plan.start) / (plan.stop - plan.start)
        found.append(Release(prefill_s * share, nbytes[chunk] * wire_ratio))
    return found


def tail_s(released: Sequence[Release], bytes_per_s: float) -> float:
    """Seconds from the last release until a link of this rate has carried everything."""
    free_at = 0.0
    for release in released:
        free_at = max(free_at, release.at_s) + release.nbytes / bytes_per_s
    return free_at - released[-1].at_s


def largest_layer(plan: TransferPlan) -> int:
    """Raw bytes of the layer of which most is released with the last chunk."""
    last = plan.pieces[-1].chunk
    nbytes: Counter[tuple[int, int]] = Counter()
    for piece in plan.pieces:
        if piece.chunk == last:
            nbytes[piece.group, piece.layer] += piece.nbytes
    return max(nbytes.values())
