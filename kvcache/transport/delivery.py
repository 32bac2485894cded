"""What a peer's connections deliver, looked at a few times a second: the rates between which the path lies. Sans-I/O.

A sender that has too little to send shows only what the path can do at least. One whose connections were all waiting
for the kernel, and had been for longer than a congestion window takes to grow, shows what the path lets through.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEEP_S = 1.25
"""How long an observation is told: a little longer than the pause between two heartbeats."""
SHORTEST_S = 0.1
WAITING_SHARE = 0.9
"""Of a window in which all connections waited for the kernel, for the path to have been the limit."""
RAMP_RTTS = 8
"""Round trips in which a congestion window grows from its start to what a fast path holds (2^8 times)."""
PACED_SHARE = 0.8
"""From this share of the pace on, the pace and not the path is taken to be the limit."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Bytes per second that a path does at least and, where it was the limit, at most; 0 where nothing is known.

    ``stalled_s`` is how long nothing has been acknowledged though all connections waited.
    """

    at_least: float = 0.0
    at_most: float = 0.0
    stalled_s: float = 0.0


class DeliveryWatch:
    """Observations of one peer. Time is handed in."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._acked = 0
        self._waited_s = 0.0
        self._waiting_for_s = 0.0
        self._stalled_s = 0.0
        self._seen: deque[tuple[float, float, float]] = deque()

    def look(self, now: float, acked: int, waited_s: float, least_rtt_s: float, pace: float) -> None:
        """Take the counts so far: bytes acknowledged, and seconds in which all connections waited for the kernel.

        Looks less than 0.1 s apart are one.
        """
        took = now - self._looked_at
        if took < SHORTEST_S:
            return
        delivered, waited = max(0, acked - self._acked), waited_s - self._waited_s
        self._looked_at, self._acked, self._waited_s = now, acked, waited_s
        waiting = waited >= WAITING_SHARE * took
        grown = self._waiting_for_s >= RAMP_RTTS * least_rtt_s
        rate = delivered / took
        self._waiting_for_s = self._waiting_for_s + took if waiting else 0.0
        self._stalled_s = self._stalled_s + took if waiting and not delivered else 0.0
        if delivered:
            limit = rate if waiting and grown and not is_paced(rate, pace) else 0.0
            self.saw(now, rate, limit)

    def saw(self, now: float, at_least: float, at_most: float) -> None:
        """One observation, from here or from a probe."""
        self._seen.append((now, at_least, at_most))
        self._forget(now)

    def told(self, now: float) -> Delivery:
        """What was seen lately: the newest limit, unless it was exceeded since, and the most that was carried since."""
        self._forget(now)
        at_least, at_most = 0.0, 0.0
        for _, low, high in self._seen:
            at_least = low if high else max(at_least, low)
            at_most = high or (at_most if at_least <= at_most else 0.0)
        return Delivery(at_least, at_most, self._stalled_s)

    def _forget(self, now: float) -> None:
        while self._seen and self._seen[0][0] < now - KEEP_S:
            self._seen.popleft()


def is_paced(rate: float, pace: float) -> bool:
    """Whether a rate says more of the pace that was set (0: none) than of the path."""
    return bool(pace) and rate >= PACED_SHARE * pace
