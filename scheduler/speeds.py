"""What was learnt from finished work: the prefill speed of a node.

State that events update; a policy sees only what it answers. Time is handed in.
"""

from __future__ import annotations

from math import isfinite

from scheduler.facts import PrefillCurve

SMOOTHING = 0.3
TELLING_TOKENS = 256
"""A prefill of fewer tokens is mostly fixed cost; what it teaches counts in proportion."""


class Ewma:
    """An exponentially weighted mean. ``value`` is None until the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float, weight: float = SMOOTHING) -> None:
        """Move towards ``sample`` by ``weight``; the first sample is taken as it is."""
        assert 0 < weight <= 1
        self.value = sample if self.value is None else self.value + weight * (sample - self.value)


class PrefillSpeed:
    """Tokens per second of one node: what was observed, or what it claims while nothing was.

    Tokens and seconds are averaged apart and by length, and begin as a second's work at the claimed speed: a short
    prompt, whose fixed cost makes a node look slow, weighs little, the first one too.
    """

    def __init__(self) -> None:
        self._tokens = Ewma()
        self._seconds = Ewma()
        self._claimed: float | None = None

    def claim(self, tokens_per_s: float) -> None:
        """What the node says of itself; 0 or less is not a claim."""
        self._claimed = tokens_per_s if tokens_per_s > 0 and isfinite(tokens_per_s) else None

    def observe(self, tokens: int, seconds: float) -> None:
        """A finished prefill. Events without tokens or time teach nothing."""
        if tokens > 0 and seconds > 0 and isfinite(seconds):
            if self._tokens.value is None and self._claimed is not None:
                self._tokens.add(self._claimed)
                self._seconds.add(1.0)
            weight = SMOOTHING * min(1.0, tokens / TELLING_TOKENS)
            self._tokens.add(tokens, weight)
            self._seconds.add(seconds, weight)

    @property
    def tokens_per_s(self) -> float | None:
        """Observed speed first, then the claim, else None."""
        if self._tokens.value is None or self._seconds.value is None:
            return self._claimed
        return self._tokens.value / self._seconds.value

    @property
    def curve(self) -> PrefillCurve | None:
        """What a decision may know: the rate, for any length."""
        rate = self.tokens_per_s
        return None if rate is None else PrefillCurve.at_rate(rate)
