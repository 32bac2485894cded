"""From what was seen of a tensor to the coordinates that it travels in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.transform import Basis

# How much of an error's weight is its plain size: what the sample's queries never asked for is not free.
_FLOOR = 0.05

Array = NDArray[np.float64]


@dataclass(slots=True)
class Moments:
    """Sums over the rows of one tensor seen so far, by head: (heads, dim) and (heads, dim, dim)."""

    rows: int
    total: Array
    outer: Array
    reach: float

    @classmethod
    def none(cls, heads: int, dim: int) -> Moments:
        """Nothing seen yet."""
        return cls(0, np.zeros((heads, dim)), np.zeros((heads, dim, dim)), 0.0)

    def add(self, values: NDArray[Any]) -> None:
        """Count in (rows, heads, dim)."""
        by_head = values.astype(np.float64).swapaxes(0, 1)
        self.rows += values.shape[0]
        self.total += by_head.sum(1)
        self.outer += by_head.swapaxes(1, 2) @ by_head
        self.reach = max(self.reach, float(np.abs(values).max()))

    def covariance(self) -> tuple[Array, Array]:
        """Means (heads, dim) and covariances (heads, dim, dim)."""
        means = self.total / self.rows
        return means, self.outer / self.rows - means[:, :, None] * means[:, None, :]


def basis(seen: Moments, harm: Array | None, part: float) -> Basis:
    """Coordinates that are uncorrelated, and in which an error's harm is its squared length.

    ``harm`` (heads, dim, dim) is the quadratic form that says what an error of a value costs: for keys the queries'
    second moment, for values what the output projection makes of it; None takes the error itself. The step is ``part``
    of the root mean square of all coordinates. Raises ValueError for a tensor that never varied.
    """
    means, covariance = seen.covariance()
    identity = np.eye(means.shape[1])
    weight = np.broadcast_to(identity, covariance.shape) if harm is None else harm
    weight = weight / np.trace(weight, axis1=1, axis2=2).mean() * means.shape[1] + _FLOOR * identity
    lower = np.linalg.cholesky(weight)
    variances, axes = np.linalg.eigh(lower.swapaxes(1, 2) @ covariance @ lower)
    axes = axes[:, :, ::-1]
    step = part * float(np.sqrt(max(variances.mean(), 0.0)))
    if not step > 0:
        raise ValueError("the values never varied")
    inverse = axes.swapaxes(1, 2) @ np.linalg.inv(lower)
    return Basis.of(means, lower @ axes, inverse, seen.reach + float(np.abs(means).max()), step)
