"""How many tokens each expert gets, of all traffic of late."""

from __future__ import annotations

from collections.abc import Sequence


class ExpertStatistics:
    """A count that forgets: each request's tokens weigh half after ``half_life`` further requests."""

    def __init__(self, experts: int, half_life: float = 64.0) -> None:
        if experts < 1 or half_life <= 0:
            raise ValueError("experts and half_life must be positive")
        self._keep = 0.5 ** (1 / half_life)
        self._tokens = [0.0] * experts

    @property
    def tokens(self) -> Sequence[float]:
        """Weighed tokens per expert; all 0 before the first request."""
        return self._tokens

    def observe(self, experts: Sequence[float]) -> None:
        """Take one request's tokens per expert. Raises ValueError where it is not one number for each."""
        if len(experts) != len(self._tokens):
            raise ValueError(f"experts: {len(experts)} numbers for {len(self._tokens)} experts")
        self._tokens = [kept * self._keep + new for kept, new in zip(self._tokens, experts, strict=True)]
