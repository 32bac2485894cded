"""Whether a failed try is repeated, and when. Only before the first byte of the answer; time and chance are handed in.

A retry costs what the first try cost, so retries have a budget: a share of the requests that came. A backend that is
dead for everybody then gets that share more, not a multiple.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    """What a try came to, as far as it decides whether another one can help."""

    NOT_SENT = "not_sent"
    """It never arrived: no connection, or the node was lost before."""
    LOST = "lost"
    """It may have arrived; what it was sent to, or the connection, is gone."""
    BUSY = "busy"
    """Refused for now: 429, 503."""
    BROKEN = "broken"
    """It failed there for no reason that lies in the request: 500, 502."""
    LATE = "late"
    """No answer in time: 408, 504."""
    REQUEST = "request"
    """The request's own fault, or what every other try would meet too: all other statuses."""


_BY_STATUS = {
    408: Failure.LATE,
    425: Failure.BUSY,
    429: Failure.BUSY,
    500: Failure.BROKEN,
    502: Failure.BROKEN,
    503: Failure.BUSY,
    504: Failure.LATE,
}


def failure_of(status: int) -> Failure | None:
    """What an HTTP status of a backend means here; None for one that is no failure."""
    return None if status < 400 else _BY_STATUS.get(status, Failure.REQUEST)


@dataclass(frozen=True, slots=True)
class RetryValues:
    """At most ``attempts`` tries in all. The pause is ``first_s`` after the first and twice as long after every next
    one, at most ``last_s``, and up to ``jitter`` of it shorter or longer."""

    attempts: int = 5
    first_s: float = 0.05
    last_s: float = 30.0
    jitter: float = 0.2

    def pause_s(self, tried: int, chance: float) -> float:
        """Seconds after that many tries; ``chance`` is uniform in [0, 1)."""
        step = min(self.last_s, self.first_s * 2.0 ** min(max(0, tried - 1), 32))
        return step * (1 + self.jitter * (2 * chance - 1))


class RetryBudget:
    """Shared by all requests: every request earns ``share`` of a retry, time earns ``per_s`` a second, ``most`` keep.

    Starts full, so that the first failures of a quiet gateway are mended.
    """

    def __init__(self, share: float = 0.2, per_s: float = 1.0, most: float = 10.0) -> None:
        self._share = share
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at: float | None = None

    def came(self, now: float) -> None:
        """A request came, and is tried for the first time."""
        self._earn(now)
        self._left = min(self._most, self._left + self._share)

    def spend(self, now: float) -> bool:
        """Take one retry from it; False where none is left."""
        self._earn(now)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _earn(self, now: float) -> None:
        if self._at is not None:
            self._left = min(self._most, self._left + self._per_s * max(0.0, now - self._at))
        self._at = now


class Retrying:
    """The tries of one request. Make it when the request comes."""

    def __init__(self, budget: RetryBudget, now: float, values: RetryValues | None = None) -> None:
        self._budget = budget
        self._values = values or RetryValues()
        self.tried = 1
        """Tries so far, the one under way included."""
        budget.came(now)

    def next_s(
        self,
        failure: Failure,
        begun: bool,
        now: float,
        left_s: float,
        chance: float,
        retry_after_s: float | None = None,
    ) -> float | None:
        """Seconds to wait before the next try, which is thereby counted; None where there must be none.

        ``begun``: a byte of the answer has left for the client. ``left_s`` until the request's deadline.
        ``retry_after_s`` is what the backend asked for.
        """
        if begun or failure is Failure.REQUEST or self.tried >= self._values.attempts:
            return None
        pause = max(self._values.pause_s(self.tried, chance), retry_after_s or 0.0)
        if pause >= left_s or not self._budget.spend(now):
            return None
        self.tried += 1
        return pause
