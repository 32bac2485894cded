"""Time to first token over the window, and how many requests met what was promised.

Who had no first token counts as one that waited for ever, in percentiles and in attainment alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite

import msgspec
import numpy as np

from scheduler.lengths import FloatArray
from scheduler.profiles import PrefillProfile
from scheduler.report.requests import Served, Window, arrivals, first_tokens, quantile

MOST_SLICES = 48
LEAST_IN_SLICE = 5
LEAST_FOR_P99 = 100


class Goals(msgspec.Struct, frozen=True):
    """TTFT <= ``ttft_floor_s`` + ``ttft_factor`` x T(l), and TPOT <= ``tpot_factor`` x ``tpot_s``; times in seconds.

    T(l) is what the quickest kind of prefill node needs for the whole prompt, idle. ``tpot_s`` None: no goal was
    stated, and TPOT is not judged. Raises ValueError for what is not positive.
    """

    ttft_floor_s: float = 2.0
    ttft_factor: float = 3.0
    tpot_s: float | None = None
    tpot_factor: float = 1.05

    def __post_init__(self) -> None:
        for name in ("ttft_floor_s", "ttft_factor", "tpot_s", "tpot_factor"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, got {value}")


class Slice(msgspec.Struct, frozen=True):
    """Requests that arrived in [``at``, ``at`` + width), Unix seconds. Percentiles are None for too few to say.

    An infinite one means that so many had no first token.
    """

    at: float
    requests: int
    p50: float | None
    p90: float | None
    p99: float | None


class Latency(msgspec.Struct, frozen=True):
    """TTFT in seconds; ``p99`` and ``slices`` as far as there are requests for them."""

    p50: float
    p90: float
    p99: float | None
    largest: float
    mean_answered: float | None
    unanswered: int
    slice_s: float
    slices: tuple[Slice, ...]


class Attainment(msgspec.Struct, frozen=True):
    """Shares of requests from 0 to 1; ``tpot`` and ``both`` are None where no TPOT goal was stated.

    ``ttft`` is None where no prefill node has shown how fast it is.
    """

    goals: Goals
    quickest: str | None
    ttft: float | None
    tpot: float | None
    both: float | None


def latency(requests: Sequence[Served], window: Window) -> Latency:
    """Of at least one request."""
    ttft, when = first_tokens(requests), arrivals(requests)
    answered = ttft[np.isfinite(ttft)]
    # as many as leave enough in each for P99, or for P90 where there are few
    slices = min(MOST_SLICES, max(len(ttft) // (LEAST_FOR_P99 * 5 // 4), min(12, len(ttft) // 12), 1))
    width = max(window.seconds, 1e-3) / slices
    place = np.clip(((when - window.since) / width).astype(np.int64), 0, slices - 1)
    return Latency(
        p50=quantile(ttft, 0.5),
        p90=quantile(ttft, 0.9),
        p99=quantile(ttft, 0.99) if len(ttft) >= LEAST_FOR_P99 else None,
        largest=float(ttft.max()),
        mean_answered=float(answered.mean()) if len(answered) else None,
        unanswered=len(ttft) - len(answered),
        slice_s=width,
        slices=tuple(_slice(window.since + i * width, ttft[place == i]) for i in range(slices)),
    )


def _slice(at: float, ttft: FloatArray) -> Slice:
    # of so few that a percentile would be the largest of them, nothing is said
    figures = [
        quantile(ttft, q) if len(ttft) >= max(LEAST_IN_SLICE, ceil(1 / (1 - q))) else None for q in (0.5, 0.9, 0.99)
    ]
    return Slice(at, len(ttft), *figures)


def attainment(requests: Sequence[Served], kinds: Sequence[PrefillProfile], goals: Goals) -> Attainment:
    """Of at least one request. ``kinds`` are all that prefill anywhere; the quickest is so for the mean prompt."""
    tokens = np.asarray([max(1, one.prompt_tokens - 1) for one in requests], dtype=np.float64)
    quickest = min(kinds, key=lambda kind: float(kind.seconds(float(tokens.mean()))), default=None)
    ttft = tpot = None
    if quickest is not None:
        ttft = first_tokens(requests) <= goals.ttft_floor_s + goals.ttft_factor * quickest.seconds(tokens)
    if goals.tpot_s is not None:
        limit = goals.tpot_factor * goals.tpot_s
        # an answer of one token has no time between tokens, and keeps that promise by ending
        tpot = np.asarray([one.finished and (one.tpot_s is None or one.tpot_s <= limit) for one in requests])
    return Attainment(
        goals,
        None if quickest is None else quickest.name,
        None if ttft is None else float(ttft.mean()),
        None if tpot is None else float(tpot.mean()),
        None if ttft is None or tpot is None else float((ttft & tpot).mean()),
    )
