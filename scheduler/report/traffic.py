"""The traffic of a window: how much came, how long prompts and answers were, and how much of them was cached."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import msgspec
import numpy as np

from scheduler.lengths import FloatArray
from scheduler.report.requests import Served, Window, arrivals, quantile

BARS_PER_OCTAVE = 2
LEAST_GAPS = 20


class Spread(msgspec.Struct, frozen=True):
    """Some lengths, in tokens, and how they lie: ``counts[i]`` of them in (``edges[i]``, ``edges[i + 1]``]."""

    count: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    largest: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]


class TrafficProfile(msgspec.Struct, frozen=True):
    """``rate`` is requests per second over the window, ``burstiness`` the gaps' coefficient of variation (1: Poisson).

    ``uncached`` leaves out requests with nothing to prefill. ``cached_share`` is of the prompt tokens of finished
    requests. What nothing is known of is None.
    """

    rate: float
    burstiness: float | None
    prompts: Spread
    uncached: Spread | None
    outputs: Spread | None
    cached_share: float | None
    offloaded_share: float
    fell_back: int
    unfinished: int


def traffic_profile(requests: Sequence[Served], window: Window) -> TrafficProfile:
    """Of at least one request."""
    uncached = [one.uncached_tokens for one in requests if one.uncached_tokens > 0]
    outputs = [one.output_tokens for one in requests if one.output_tokens is not None and one.output_tokens > 0]
    known = [(one.cached_tokens, one.prompt_tokens) for one in requests if one.cached_tokens is not None]
    tokens = sum(prompt for _, prompt in known)
    return TrafficProfile(
        rate=len(requests) / window.seconds if window.seconds > 0 else 0.0,
        burstiness=burstiness(requests),
        prompts=spread([one.prompt_tokens for one in requests]),
        uncached=spread(uncached) if uncached else None,
        outputs=spread(outputs) if outputs else None,
        cached_share=sum(cached for cached, _ in known) / tokens if tokens else None,
        offloaded_share=sum(one.remote for one in requests) / len(requests),
        fell_back=sum(one.fallback for one in requests),
        unfinished=sum(not one.finished for one in requests),
    )


def burstiness(requests: Sequence[Served]) -> float | None:
    """Deviation over mean of the gaps between arrivals; None for fewer than ``LEAST_GAPS`` or all at one moment."""
    gaps = np.diff(np.sort(arrivals(requests)))
    if len(gaps) < LEAST_GAPS or not gaps.mean() > 0:
        return None
    return float(gaps.std() / gaps.mean())


def spread(tokens: Sequence[int]) -> Spread:
    """Of at least one positive length; bars are half an octave wide."""
    values: FloatArray = np.asarray(tokens, dtype=np.float64)
    first = ceil(log2(float(values.min())) * BARS_PER_OCTAVE) - 1
    last = max(first + 1, ceil(log2(float(values.max())) * BARS_PER_OCTAVE))
    edges = np.exp2(np.arange(first, last + 1) / BARS_PER_OCTAVE)
    # bars are closed above, as a threshold is: what is as long as it stays
    bars = np.clip(np.searchsorted(edges, values * (1 - 1e-12), side="left") - 1, 0, last - first - 1)
    counts = np.bincount(bars, minlength=last - first)
    return Spread(
        count=len(values),
        mean=float(values.mean()),
        p10=quantile(values, 0.10),
        p50=quantile(values, 0.50),
        p90=quantile(values, 0.90),
        p99=quantile(values, 0.99),
        largest=float(values.max()),
        edges=tuple(float(edge) for edge in edges),
        counts=tuple(int(count) for count in counts),
    )
