"""How far predictions of the time to first token were off, per cluster: what was observed outweighs what is claimed."""

from __future__ import annotations

from math import exp, isfinite, log

SMOOTHING = 0.2
TELLING_S = 0.5
"""A shorter prediction is mostly other delays; what it teaches counts in proportion."""
LEAST, MOST = 0.5, 4.0
HALF_LIFE_S = 300.0
"""A cluster that is avoided for what was seen of it must come to be tried again."""


class TtftRatio:
    """Observed over predicted, as a mean of logarithms, within [0.5, 4]; without news it goes back to 1."""

    def __init__(self) -> None:
        self._log = 0.0
        self._at = 0.0

    def observe(self, predicted_s: float, observed_s: float, now: float) -> None:
        """A first token came after ``observed_s``, which ``predicted_s`` was said of before this ratio was applied."""
        if not (isfinite(predicted_s) and isfinite(observed_s) and predicted_s > 0 and observed_s > 0):
            return
        weight = SMOOTHING * min(1.0, predicted_s / TELLING_S)
        seen = min(max(observed_s / predicted_s, LEAST), MOST)
        known = self._faded(now)
        self._log, self._at = known + weight * (log(seen) - known), now

    def value(self, now: float) -> float:
        """What to multiply a prediction by."""
        return exp(self._faded(now))

    def _faded(self, now: float) -> float:
        kept: float = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        return self._log * kept
