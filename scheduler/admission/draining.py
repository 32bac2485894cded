"""How fast a queue gets shorter, seen over its last half minute: what a newcomer's wait is predicted from."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
LEAST_S = 2.0
"""A shorter look says nothing."""


class DrainRate:
    """Seconds of work a second that leave a queue while somebody waits in it."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def busy(self, now: float) -> None:
        """Somebody waits from now on, if nobody did."""
        if self._since is None:
            self._since = now

    def empty(self) -> None:
        """Nobody waits: what was seen is of a load that is over."""
        self._since = None
        self._taken.clear()
        self._sum = 0.0

    def took(self, work_s: float, now: float) -> None:
        """A request's turn came."""
        self._taken.append((now, work_s))
        self._sum += work_s

    def rate(self, now: float) -> float | None:
        """None where nobody has waited for long enough; 0 where nobody's turn came."""
        if self._since is None or now - self._since < LEAST_S:
            return None
        while self._taken and self._taken[0][0] <= now - WINDOW_S:
            self._sum -= self._taken.popleft()[1]
        return max(0.0, self._sum) / min(WINDOW_S, now - self._since) if self._taken else 0.0
