"""Has the traffic changed, and since when? Likelihood ratios over every possible moment of one change.

Both tests split what a window holds at each step boundary in turn and compare two explanations of it: one mean
throughout, or one before and another after. The largest log ratio beyond ``EVIDENCE`` places the change. A ratio of 14
is a deviation of 5.3 standard errors: over a day of steps a false alarm is unlikely, and all that one does is shorten
the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.lengths import FloatArray

EVIDENCE = 14.0
LEAST_AFTER = 24
"""Fewer samples than these show no change of a mean, however far off they lie."""
DISPERSION = 2.0
"""Variance of a count over its mean: output lengths whose deviation exceeds their mean make ends come in clusters."""


def mean_changed_at(counts: Sequence[float], sums: Sequence[float], squares: Sequence[float]) -> int | None:
    """The step from which samples have another mean (Gaussian, variance within the parts); None for no change.

    ``counts``, ``sums`` and ``squares`` are those of each step's samples.
    """
    if len(counts) < 2:
        return None
    n, total, square = (np.cumsum(np.asarray(part, dtype=np.float64)) for part in (counts, sums, squares))
    before, after = n[:-1], n[-1] - n[:-1]
    fit = (before > 0) & (after >= LEAST_AFTER)
    if not fit.any():
        return None
    before, after, at = before[fit], after[fit], total[:-1][fit]
    first, second = at / before, (total[-1] - at) / after
    within = np.maximum(square[-1] - before * first**2 - after * second**2, 1e-12) / n[-1]
    ratio = before * after / n[-1] * (first - second) ** 2 / within / 2
    return _place(ratio, np.flatnonzero(fit))


def rate_changed_at(ends: Sequence[float], exposures: Sequence[float]) -> int | None:
    """The step from which ``ends`` come at another rate per ``exposure`` (over-dispersed Poisson); None for no change.

    No end at all where many were due counts as well: that is how a longer output shows first.
    """
    if len(ends) < 2:
        return None
    r, s = (np.cumsum(np.asarray(part, dtype=np.float64)) for part in (ends, exposures))
    r1, r2, s1, s2 = r[:-1], r[-1] - r[:-1], s[:-1], s[-1] - s[:-1]
    fit = (s1 > 0) & (s2 > 0)
    if not fit.any():
        return None
    r1, r2, s1, s2 = (part[fit] for part in (r1, r2, s1, s2))
    ratio = (_events(r1, s1) + _events(r2, s2) - _events(r1 + r2, s1 + s2)) / DISPERSION
    return _place(ratio, np.flatnonzero(fit))


def _events(r: FloatArray, s: FloatArray) -> FloatArray:
    """r ln(r / s), 0 for r = 0."""
    return np.where(r > 0, r * np.log(np.maximum(r, 1e-300) / s), 0.0)


def _place(ratio: FloatArray, boundaries: NDArray[np.intp]) -> int | None:
    best = int(np.argmax(ratio))
    return int(boundaries[best]) + 1 if ratio[best] > EVIDENCE else None
