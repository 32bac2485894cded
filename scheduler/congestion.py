"""Whether a link is congested: signs with two thresholds each, and a time that they must last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known of a link; None where it was not measured. ``queue_s`` is the round trip above its least."""

    rate: float | None = None
    best: float | None = None
    loss: float | None = None
    queue_s: float | None = None
    least_rtt_s: float | None = None
    utilisation: float | None = None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on a sign counts. A queue counts only on a link in use, from ``queue_rtts`` and ``queue_s`` on."""

    loss: float
    rate_share: float
    utilisation: float
    queue_rtts: float
    queue_s: float

    def reached(self, signs: Signs) -> bool:
        """Whether any sign is there."""
        if signs.loss is not None and signs.loss >= self.loss:
            return True
        if signs.rate is not None and signs.best is not None and signs.rate <= self.rate_share * signs.best:
            return True
        if signs.utilisation is None or signs.queue_s is None or signs.utilisation < self.utilisation:
            return False
        return signs.queue_s >= max(self.queue_s, self.queue_rtts * (signs.least_rtt_s or 0.0))


ENTER = Thresholds(loss=0.05, rate_share=0.25, utilisation=0.9, queue_rtts=1.0, queue_s=0.05)
STAY = Thresholds(loss=0.02, rate_share=0.4, utilisation=0.7, queue_rtts=0.5, queue_s=0.025)
ENTER_S = 1.0
LEAVE_S = 2.0


class Congestion:
    """Entered when a sign has been there for a second, left when none has been, by lower marks, for two."""

    def __init__(self) -> None:
        self.congested = False
        self._since: float | None = None

    def update(self, signs: Signs, now: float) -> None:
        """The signs as they are now."""
        turning = not STAY.reached(signs) if self.congested else ENTER.reached(signs)
        if not turning:
            self._since = None
            return
        if self._since is None or now < self._since:
            self._since = now
        if now - self._since >= (LEAVE_S if self.congested else ENTER_S):
            self.congested, self._since = not self.congested, None
