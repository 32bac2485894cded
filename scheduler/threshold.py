"""Following the best threshold as traffic, nodes and links change, without running after every wobble.

The best one comes from the throughput model over the lengths that were observed after prefix matching (equation 7):
where prefill at home and in the clusters are full together.
"""

from __future__ import annotations

STEP = 0.1
"""Less of a change than this share is not worth having: the model is flat around its best point."""
IN_A_ROW = 2
SURGE = 2.0
"""A change by this factor is followed at once: a link was cut, or a cluster lost."""


class ThresholdFollower:
    """Holds what was proposed last. A new best is followed when it was asked for twice in a row in one direction."""

    def __init__(self) -> None:
        self._asked = 0

    def follow(self, in_force: int, best: float) -> int:
        """The threshold to use from now on, in tokens, given the one in force and the best for what is known now."""
        wanted = max(0, round(best))
        low, high = sorted((max(1, in_force), max(1, wanted)))
        if high <= low * (1 + STEP):
            self._asked = 0
            return in_force
        direction = 1 if wanted > in_force else -1
        self._asked = self._asked + direction if self._asked * direction > 0 else direction
        if abs(self._asked) >= IN_A_ROW or high >= SURGE * low:
            self._asked = 0
            return wanted
        return in_force
