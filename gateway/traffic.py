"""What passes through the gateway, counted for the long-term controller: lengths that come, tokens that go."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.controller.ledger import Ledger, added
from scheduler.controller.observation import Spoken

MOST_HEARD = 1 << 12
MOST_LENGTHS = 1 << 16
"""Between two looks of the controller; more say nothing new."""


class TrafficMeter:
    """Counts between two calls of ``take``. All methods run on the event loop."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._ledger = Ledger()
        self._heard: list[Spoken] = []

    def arrived(self, uncached_tokens: int) -> None:
        """A request with so many tokens to prefill."""
        if len(self._lengths) < MOST_LENGTHS:
            self._lengths.append(uncached_tokens)

    def spoke(self, answer: object, tokens: int, now: float) -> None:
        """New tokens of an answer."""
        self._ledger.spoke(id(answer), tokens, now)

    def ended(self, answer: object, whole: bool) -> None:
        """An answer is over; ``whole`` where it was not broken off."""
        self._ledger.ended(id(answer), whole)

    def heard(self, lengths: Sequence[int], spoken: Sequence[Spoken]) -> None:
        """What went through another gateway; ``begun`` by this one's clock."""
        self._lengths += lengths[: MOST_LENGTHS - len(self._lengths)]
        self._heard += spoken[: MOST_HEARD - len(self._heard)]

    def take(self) -> tuple[tuple[int, ...], tuple[Spoken, ...]]:
        """Lengths and account since the last call."""
        lengths, self._lengths = tuple(self._lengths), []
        heard, self._heard = self._heard, []
        return lengths, added((*self._ledger.take(), *heard)) if heard else self._ledger.take()
