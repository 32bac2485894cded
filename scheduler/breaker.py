"""Whether a backend is tried at all: a circuit breaker that opens after failures and closes again. Time is handed in.

Closed: all go there. After so many failures in a row it is open: none goes there. After a while it is half-open: one at
a time goes there, on trial; enough successes in a row close it, a failure opens it again. What tells more than failures
in a row may open it, too (``trip``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """How much of the traffic that would go to a backend may."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerValues:
    """Opens after ``failures`` in a row, is half-open after ``open_s`` seconds, closes after ``successes`` in a row."""

    failures: int = 10
    successes: int = 3
    open_s: float = 60.0

    def __post_init__(self) -> None:
        if self.failures < 1 or self.successes < 1 or not self.open_s > 0:
            raise ValueError(f"failures and successes must be at least 1 and open_s positive, got {self}")


class Breaker:
    """Of one backend. Ask ``admits`` before a decision, ``begin`` where one goes there, and end what was begun."""

    def __init__(self, values: BreakerValues | None = None) -> None:
        self.values = values or BreakerValues()
        self.opened = 0
        """How often it has opened so far."""
        self.proved_at: float | None = None
        """When something that went there last succeeded."""
        self._failures = 0
        self._successes = 0
        self._opened_at: float | None = None
        self._trial: Call | None = None

    def state(self, now: float) -> BreakerState:
        """What it is at that time."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._opened_at + self.values.open_s else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a request may go there: any while it is closed, one at a time while it is half-open."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def retry_after_s(self, now: float) -> float:
        """Seconds until it may admit somebody; 0 where it admits, or only a trial under way is in the way."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self.values.open_s - now)

    def begin(self, now: float) -> Call:
        """A request goes there, whether it was admitted or is sent regardless. Its ``end`` must be called."""
        call = Call(self, self.opened)
        if self.state(now) is BreakerState.HALF_OPEN and self._trial is None:
            self._trial = call
        return call

    def trip(self, now: float) -> None:
        """Open at once: there is evidence that needs no row of failures."""
        self._opened_at, self._failures, self._successes = now, 0, 0
        self._trial = None
        self.opened += 1

    def _ended(self, call: Call, epoch: int, well: bool | None, now: float) -> None:
        """Only what was begun since it last opened is news; in half-open only the one on trial."""
        if well:
            self.proved_at = now
        trial = call is self._trial
        if trial:
            self._trial = None
        if well is None or epoch != self.opened or (self._opened_at is not None and not trial):
            return
        if well:
            self._failures = 0
            self._successes += 1
            if self._successes >= self.values.successes:
                self._opened_at = None
            return
        self._failures += 1
        if self._opened_at is not None or self._failures >= self.values.failures:
            self.trip(now)
        else:
            self._successes = 0


class Call:
    """One request to a backend, from ``Breaker.begin``."""

    __slots__ = ("_breaker", "_epoch")

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker: Breaker | None = breaker
        self._epoch = epoch

    def end(self, well: bool | None, now: float) -> None:
        """It succeeded or failed; None where it says nothing of the backend: a client that left. Idempotent."""
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker._ended(self, self._epoch, well, now)
