"""Distributions of the uncached input length L, as the throughput model needs them.

A model asks only for probabilities and partial expectations, E[f(L); low < L <= high]: conditional means such as
l_long = E[L | L > t] or E[T(L) | L > t] are these divided by the class's probability. Lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, erfc, exp, inf, log, sqrt
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
TokenFunction = Callable[[FloatArray], FloatArray]
"""A figure of a prompt by its tokens, elementwise over an array of any shape."""

_PANEL = 0.25
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_FARTHEST_Z = 12.0
_LEAST_MASS = 1e-9
_LEAST_SHARE = 1e-12
"""A smaller class is the rounding of a difference, and its mean would be noise."""


class LengthDistribution(Protocol):
    """What a plan may ask of a distribution of lengths."""

    def above(self, t: float) -> float:
        """p(t) = P(L > t)."""
        ...

    def expect(self, f: TokenFunction, low: float, high: float) -> float:
        """The partial expectation E[f(L); low < L <= high]; 0 where nothing lies between."""
        ...

    def quantile(self, q: float) -> float:
        """The least length that is at least a share ``q`` of all; 0 < q < 1."""
        ...

    def thresholds(self) -> FloatArray:
        """Thresholds worth trying, ascending, from one that offloads all to one that offloads nothing."""
        ...


def identity(tokens: FloatArray) -> FloatArray:
    """L itself, for ``expect``."""
    return tokens


def mean_length(lengths: LengthDistribution, low: float = 0.0, high: float = inf) -> float:
    """E[L | low < L <= high]. Raises ValueError where no length lies between."""
    share = lengths.above(low) - lengths.above(high)
    if share <= 0:
        raise ValueError(f"no length lies in ({low}, {high}], so it has no mean")
    return lengths.expect(identity, low, high) / share


@dataclass(frozen=True, slots=True)
class TruncatedLogNormal:
    """ln L is normal (``mu``, ``sigma``), given that ``low`` <= L <= ``high``.

    Expectations are taken by Gauss-Legendre quadrature in z = (ln L - mu) / sigma, on panels of a quarter deviation:
    exact to rounding for smooth f, to about 1e-5 where f has a kink. Raises ValueError naming the parameter at fault.
    """

    mu: float
    sigma: float
    low: float
    high: float
    _mass: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.sigma <= 0:
            raise ValueError(f"sigma must be positive, got {self.sigma}")
        if not 0 < self.low < self.high:
            raise ValueError(f"bounds must be 0 < low < high, got [{self.low}, {self.high}]")
        mass = self._above_z(self._z(self.low)) - self._above_z(self._z(self.high))
        if mass < _LEAST_MASS:
            raise ValueError(
                f"[{self.low}, {self.high}] holds less than {_LEAST_MASS} of log-normal({self.mu}, {self.sigma}); "
                "move the bounds to where the lengths are"
            )
        object.__setattr__(self, "_mass", mass)

    def above(self, t: float) -> float:
        """p(t) = P(L > t)."""
        if t < self.low:
            return 1.0
        if t >= self.high:
            return 0.0
        share = (self._above_z(self._z(t)) - self._above_z(self._z(self.high))) / self._mass
        return 0.0 if share < _LEAST_SHARE else 1.0 if share > 1 - _LEAST_SHARE else share

    def expect(self, f: TokenFunction, low: float, high: float) -> float:
        """E[f(L); low < L <= high]."""
        start = max(self._z(max(low, self.low)), -_FARTHEST_Z)
        stop = min(self._z(min(high, self.high)), _FARTHEST_Z)
        if start >= stop:
            return 0.0
        panels = ceil((stop - start) / _PANEL)
        half = (stop - start) / panels / 2
        middles = start + half * (2 * np.arange(panels) + 1)
        z = middles[:, None] + half * _NODES
        density = np.exp(-z * z / 2) / sqrt(2 * np.pi)
        total = np.sum(f(np.exp(self.mu + self.sigma * z)) * density * _WEIGHTS)
        return float(total) * half / self._mass

    def quantile(self, q: float) -> float:
        """The length below which a share ``q`` lies."""
        below = 1 - self._above_z(self._z(self.low))
        return exp(self.mu + self.sigma * NormalDist().inv_cdf(below + q * self._mass))

    def thresholds(self) -> FloatArray:
        """257 lengths in equal ratios from ``low`` to ``high``."""
        return np.geomspace(self.low, self.high, 257)

    def _z(self, tokens: float) -> float:
        return (log(tokens) - self.mu) / self.sigma

    @staticmethod
    def _above_z(z: float) -> float:
        return erfc(z / sqrt(2)) / 2
