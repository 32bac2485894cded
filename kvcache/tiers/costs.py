"""What it costs to have KV again, computed or read back: from a learnt prefill speed and measured tiers."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.kept import EntryKind

FIRST_GUESS_BYTES_PER_S = 1e9
WEIGHT = 0.3
BELIEVED_S = 60.0
"""What was measured longer ago no longer forbids to read: else a tier that was slow once would never be tried again."""


class TierSpeed:
    """How fast one tier gives back what it holds, waiting for its threads included. ``now`` is seconds of any clock."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._at = float("-inf")

    def read(self, nbytes: int, seconds: float, now: float) -> None:
        """So much was read."""
        seen = nbytes / max(seconds, 1e-6)
        known = self.bytes_per_s
        self.bytes_per_s = seen if known is None else known + WEIGHT * (seen - known)
        self._at = now

    def seconds(self, nbytes: int) -> float:
        """To read so much, by what is known or guessed."""
        return nbytes / (self.bytes_per_s or FIRST_GUESS_BYTES_PER_S)

    def is_believed(self, now: float) -> bool:
        """Whether that was measured of late."""
        return now - self._at <= BELIEVED_S


class Costs:
    """``prefill_tokens_per_s`` says how fast this node computes, 0 while that is not known."""

    def __init__(self, page_bytes: int, speeds: list[TierSpeed], prefill_tokens_per_s: Callable[[], float]) -> None:
        self.speeds = speeds
        self._page_bytes = page_bytes
        self._prefill = prefill_tokens_per_s

    def value(self, kind: EntryKind, tokens: int, pages: int, copied: bool) -> float:
        """Of an entry of the pool (``kvcache.kept.Value``), in tokens for each page.

        What has a copy below is read back from the slowest tier, in which it may be by then: in the time that takes, so
        many tokens could be computed.
        """
        rate = self._prefill()
        if not copied or not rate:
            return tokens / pages
        slowest = max(speed.seconds(self._page_bytes) for speed in self.speeds)
        return min(tokens / pages, slowest * rate)

    def compute_s(self, tokens: int) -> float | None:
        """To compute tokens again; None where this node's speed is not known."""
        rate = self._prefill()
        return tokens / rate if rate else None

    def reload_s(self, sizes: list[int]) -> float:
        """To read so many bytes of each tier."""
        return sum(speed.seconds(nbytes) for speed, nbytes in zip(self.speeds, sizes, strict=True) if nbytes)

    def pays(self, sizes: list[int], tokens: int, now: float) -> bool:
        """Whether reading so many bytes of each tier is cheaper than computing ``tokens``; yes where nobody knows."""
        compute = self.compute_s(tokens)
        used = [speed for speed, nbytes in zip(self.speeds, sizes, strict=True) if nbytes]
        if compute is None or not all(speed.is_believed(now) for speed in used):
            return True
        return self.reload_s(sizes) < compute
