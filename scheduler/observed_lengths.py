"""Lengths as traffic brings them: a streaming histogram that forgets, and what it held at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from scheduler.lengths import FloatArray, TokenFunction

BINS_PER_OCTAVE = 32
OCTAVES = 24
"""Bins are 2.2 % wide and reach to 2^24 tokens; a longer prompt joins the last bin with its true length."""

_LARGEST_WEIGHT = 2.0**512


@dataclass(frozen=True, slots=True, eq=False)
class ObservedLengths:
    """Observed lengths at one moment: ascending ``means`` of the filled bins, their ``shares`` and upper ``edges``.

    Lengths of one bin count as its mean, so E[L] is exact, every conditional mean is consistent with its probability,
    and a threshold is sharp to a bin.
    """

    means: FloatArray
    shares: FloatArray
    edges: FloatArray

    def above(self, t: float) -> float:
        """p(t) = P(L > t)."""
        return 1.0 if t < self.means[0] else float(np.sum(self.shares[self.means > t]))

    def expect(self, f: TokenFunction, low: float, high: float) -> float:
        """E[f(L); low < L <= high]."""
        inside = (self.means > low) & (self.means <= high)
        return float(np.sum(f(self.means[inside]) * self.shares[inside]))

    def quantile(self, q: float) -> float:
        """The mean of the first bin up to which at least a share ``q`` lies."""
        index = int(np.searchsorted(np.cumsum(self.shares), q))
        return float(self.means[min(index, len(self.means) - 1)])

    def thresholds(self) -> FloatArray:
        """0 and the upper edge of every filled bin."""
        return np.concatenate((np.zeros(1), self.edges))


class LengthHistogram:
    """Counts lengths in logarithmic bins; an observation's weight halves every ``half_life_s``.

    Only the ratio of weights matters, so newer observations weigh more instead of older ones being scaled. Time is
    handed in. Raises ValueError for a half-life that is not positive.
    """

    def __init__(self, half_life_s: float) -> None:
        if half_life_s <= 0:
            raise ValueError(f"half_life_s must be positive, got {half_life_s}")
        self.half_life_s = half_life_s
        self._weights = np.zeros(BINS_PER_OCTAVE * OCTAVES + 1)
        self._tokens = np.zeros_like(self._weights)
        self._origin_s: float | None = None

    def add(self, tokens: int, now: float) -> None:
        """A request whose prompt has ``tokens`` uncached tokens.

        Raises ValueError below 1: a request with nothing to prefill is not part of this distribution.
        """
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}; leave out requests with nothing to prefill")
        if self._origin_s is None:
            self._origin_s = now
        weight = self._weight_of(now, self._origin_s)
        if weight > _LARGEST_WEIGHT:
            self._weights /= weight
            self._tokens /= weight
            self._origin_s, weight = now, 1.0
        index = min(ceil(log2(tokens) * BINS_PER_OCTAVE), len(self._weights) - 1)
        self._weights[index] += weight
        self._tokens[index] += weight * tokens

    def weight(self, now: float) -> float:
        """How many observations of this moment the histogram is worth: what a reader may trust it by."""
        return 0.0 if self._origin_s is None else float(np.sum(self._weights)) / self._weight_of(now, self._origin_s)

    def snapshot(self) -> ObservedLengths | None:
        """What was observed, aged; None where nothing was."""
        total = np.sum(self._weights)
        if total == 0:
            return None
        # so faint beside the rest that its mean has lost its digits
        filled = np.flatnonzero(self._weights > total * 1e-12)
        weights = self._weights[filled]
        means = self._tokens[filled] / weights
        edges = np.maximum(np.exp2(filled / BINS_PER_OCTAVE), means)
        return ObservedLengths(means, weights / np.sum(weights), edges)

    def _weight_of(self, now: float, origin_s: float) -> float:
        """2 to the half-lives since the origin; past a thousand of them older observations are nothing anyway."""
        return float(2.0 ** min(max((now - origin_s) / self.half_life_s, 0.0), 1000.0))
