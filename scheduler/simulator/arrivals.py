"""Synthetic traffic: when requests come and how long they are, from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.lengths import FloatArray, LengthDistribution
from scheduler.simulator.traffic import Traffic

_QUANTILES = 4097


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``requests`` at ``rate`` a second on average. The gaps between them have coefficient of variation ``cv``.

    cv 1 is a Poisson process; above, gaps are gamma-distributed, which makes bursts. ``stratified``: lengths are one
    from each of as many equal strata of their distribution, in random order, and the mean rate is exactly ``rate``, so
    that 20,000 requests say what 50,000 independent ones do.
    """

    requests: int
    rate: float
    cv: float = 1.0
    stratified: bool = False

    def __post_init__(self) -> None:
        if self.requests < 1 or not self.rate > 0 or not self.cv > 0:
            raise ValueError(f"arrivals: requests, rate and cv must be positive, got {self}")


def synthetic(arrivals: Arrivals, lengths: LengthDistribution, output_tokens: int, seed: int) -> Traffic:
    """Requests with prompts from ``lengths``, which counts what is prefilled: all but a prompt's last token."""
    when, what = (np.random.default_rng((seed, stream)) for stream in (0, 1))
    count = arrivals.requests
    shape = 1 / (arrivals.cv * arrivals.cv)
    arrival_s = np.cumsum(when.gamma(shape, 1 / (arrivals.rate * shape), count))
    if arrivals.stratified:
        arrival_s *= count / arrivals.rate / arrival_s[-1]
        shares = what.permutation((np.arange(count) + what.random(count)) / count)
    else:
        shares = what.random(count)
    tokens = np.rint(_quantiles(lengths, shares)).astype(np.int64)
    return Traffic(arrival_s, np.maximum(tokens, 1) + 1, np.full(count, output_tokens, dtype=np.int64))


def _quantiles(lengths: LengthDistribution, shares: FloatArray) -> FloatArray:
    """The distribution's quantiles at ``shares``, straight lines between a few thousand of them on both sides."""
    # strata that thin out towards both ends, where lengths change fastest
    z = np.linspace(-14.0, 14.0, _QUANTILES)
    grid = 1 / (1 + np.exp(-z))
    found: FloatArray = np.interp(shares, grid, np.array([lengths.quantile(float(q)) for q in grid]))
    return found
