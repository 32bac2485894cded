"""How long to wait before trying again: twice as long after every failure, bounded, and never in step with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import SystemRandom


@dataclass(slots=True)
class Backoff:
    """Delays between ``first_s`` and ``last_s`` seconds, each drawn from the upper half of its step."""

    first_s: float
    last_s: float
    uniform: Callable[[float, float], float] = field(default_factory=lambda: SystemRandom().uniform)
    _failures: int = 0

    def next_delay(self) -> float:
        """Seconds to wait after one more failure."""
        step = min(self.last_s, self.first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return self.uniform(step / 2, step)

    def reset(self) -> None:
        """It worked: the next failure waits briefly again."""
        self._failures = 0
