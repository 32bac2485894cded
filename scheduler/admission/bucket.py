"""A token bucket that can owe: what costs more than it holds passes when it is full, and is paid back afterwards."""

from __future__ import annotations

ROUNDING = 1e-9
"""Who waited as long as told must not be told to wait for the rest of a sum."""


class TokenBucket:
    """Fills at ``per_s`` up to ``burst``. In any T seconds no more passes than per_s x T + max(burst, the dearest)."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        assert per_s > 0
        assert burst > 0
        self.per_s = per_s
        self.burst = burst
        self._level = burst
        self._at = now

    def change(self, per_s: float, burst: float, now: float) -> None:
        """Another rate from now on; what is owed stays owed."""
        self._fill(now)
        self.per_s, self.burst = per_s, burst
        self._level = min(self._level, burst)

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until so much may pass, 0 for now."""
        self._fill(now)
        cost = min(cost, self.burst)
        lacks = cost - self._level
        return lacks / self.per_s if lacks > ROUNDING * cost else 0.0

    def spend(self, cost: float, now: float) -> None:
        """Take it out, also what is not there. A negative cost is given back, as far as it finds room."""
        self._fill(now)
        self._level = min(self.burst, self._level - cost)

    def holds(self, now: float) -> float:
        """What may pass at once now."""
        self._fill(now)
        return max(0.0, self._level)

    def full_in_s(self, now: float) -> float:
        """Seconds until it is full, if nothing passes."""
        self._fill(now)
        return (self.burst - self._level) / self.per_s

    def full(self, now: float) -> bool:
        """Whether nothing is owed or missing: a new bucket would be the same."""
        self._fill(now)
        return self._level >= self.burst * (1 - ROUNDING)

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self.burst, self._level + (now - self._at) * self.per_s)
            self._at = now
