"""When an idle link is worth a probe, and how many bytes one may have.

A link that decisions avoid would never be measured again: nothing else tells that it has recovered. One that no
decision has asked about for a while is left alone.
"""

from __future__ import annotations

SHARE = 0.017
"""Of what the link was last seen to carry, over any time: the most that probes take. They may take a fiftieth."""
EVERY_S = 1.5
AGAIN_S = 0.2
RESERVE = 0.5
"""Of what is saved, kept for another probe at once where one has shown that the link is faster than was known."""
QUIET_S = 1.0
"""A link over which more than probes went so short a time ago has been measured by that."""
WANTED_S = 30.0
UNIT_BYTES = 16 << 10
LEAST_BYTES = 4 * UNIT_BYTES
MOST_BYTES = 2 << 20
SLOWEST_BYTES_PER_S = 1.25e6
"""What any link is taken to carry at least: one that is believed to carry nothing must be measured again some day."""


class ProbeBudget:
    """Bytes that probes may take, saved up at ``SHARE`` of the rate. Time is handed in."""

    def __init__(self) -> None:
        self._saved = 0.0
        self._saved_at: float | None = None
        self._probed_at = float("-inf")
        self._carried_at = float("-inf")
        self._wanted_at = float("-inf")

    def wanted(self, now: float) -> None:
        """A decision has asked about the link."""
        self._wanted_at = now

    def carried(self, now: float) -> None:
        """More than a probe has crossed it."""
        self._carried_at = now

    def save(self, bytes_per_s: float | None, now: float) -> None:
        """The link has been this fast since the last call."""
        if self._saved_at is not None:
            rate = max(SLOWEST_BYTES_PER_S, bytes_per_s or 0.0)
            self._saved = min(float(MOST_BYTES), self._saved + SHARE * rate * max(0.0, now - self._saved_at))
        self._saved_at = now

    def due(self, now: float, faster: bool) -> int:
        """Bytes of the probe that is due, 0 where none is; ``faster``: the last one has raised what is known."""
        since = now - self._probed_at
        if now - self._wanted_at > WANTED_S or now - self._carried_at < QUIET_S or since < AGAIN_S:
            return 0
        if not faster and since < EVERY_S:
            return 0
        saved = self._saved if faster else max(LEAST_BYTES, (1 - RESERVE) * self._saved)
        nbytes = int(min(saved, self._saved)) // UNIT_BYTES * UNIT_BYTES
        return nbytes if nbytes >= LEAST_BYTES else 0

    def spend(self, nbytes: int, now: float) -> None:
        """A probe of so many bytes is sent."""
        self._saved -= nbytes
        self._probed_at = now
