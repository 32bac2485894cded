"""A mean that forgets: what estimators of speeds are made of."""

from __future__ import annotations

SMOOTHING = 0.3


class Ewma:
    """An exponentially weighted mean. ``value`` is None until the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float, weight: float = SMOOTHING) -> None:
        """Move towards ``sample`` by ``weight``; the first sample is taken as it is."""
        assert 0 < weight <= 1
        self.value = sample if self.value is None else self.value + weight * (sample - self.value)
