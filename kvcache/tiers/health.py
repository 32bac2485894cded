"""Whether a tier can be used: one that is full, read-only or broken is left alone for a while, and tried again."""

from __future__ import annotations

import errno

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
LATELY_S = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Health:
    """Of one tier. Writing pauses after a failure, twice as long after each; reading too unless it is merely full."""

    def __init__(self) -> None:
        self.failure = ""
        self._readable = True
        self._pause_s = FIRST_PAUSE_S
        self._until = self._failed_at = float("-inf")

    @property
    def is_full(self) -> bool:
        """Whether it failed for want of room, and nothing else is wrong."""
        return bool(self.failure) and self._readable

    def failed_lately(self, now: float) -> bool:
        """Whether that is so recent that what went wrong is likely to go wrong again."""
        return now - self._failed_at < LATELY_S

    def failed(self, error: OSError, now: float) -> None:
        """Something went wrong. What fails while it pauses already makes the pause no longer."""
        self._failed_at = now
        self._readable = error.errno in _FULL
        self.failure = ("full: " if self._readable else "failing: ") + (error.strerror or str(error))
        if now >= self._until:
            self._until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def worked(self) -> None:
        """A write has gone well."""
        self.failure, self._readable = "", True
        self._pause_s, self._until = FIRST_PAUSE_S, float("-inf")

    def can_write(self, now: float) -> bool:
        """Whether to try."""
        return now >= self._until

    def can_read(self, now: float) -> bool:
        """Whether what it holds can be had."""
        return self._readable or now >= self._until

    def pause_left_s(self, now: float) -> float:
        """Until writing is tried again; 0 where it can be now."""
        return max(0.0, self._until - now)
