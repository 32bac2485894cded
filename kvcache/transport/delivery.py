"""What a peer's connections deliver, looked at a few times a second: the rates between which the path lies. Sans-I/O.

A sender that has too little to send shows only what the path can do at least, while it has something. The path itself
was the limit where all that it delivered in a while had been in the kernel before, with more behind it, or where all
connections waited for the kernel; and where this had been so for longer than a congestion window takes to grow, or the
way was visibly queueing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEEP_S = 1.25
"""How long an observation is told: a little longer than the pause between two heartbeats."""
SHORTEST_S = 0.1
SHORTEST_BUSY_S = 0.02
WAITING_SHARE = 0.9
"""Of a window in which all connections waited for the kernel, for the path to have been the limit."""
TELLING_BYTES = 16 << 10
"""A window in which less arrived is left out: pings and acknowledgements show no rate."""
LEAST_BACKLOG = 64 << 10
"""What must be left, of what was on its way when a window began, for the path to have been busy to its end."""
RAMP_RTTS = 8
"""Round trips in which a congestion window grows from its start to what a fast path holds (2^8 times)."""
QUEUEING = 2.0
"""A round trip of so many times its least stands in a queue: what is sent faster only makes that longer."""
LIMITS = 3
"""A limit is the mean of up to so many windows in a row: what arrives at once after a loss belongs to several."""
PACED_SHARE = 0.8
"""From this share of the pace on, the pace and not the path is taken to be the limit."""


@dataclass(frozen=True, slots=True)
class Counts:
    """All connections of one peer at one moment.

    ``delivered`` bytes have arrived since the peer began, ``outstanding`` ones are in the kernel and have not. Since
    the beginning, something was outstanding for ``busy_s``, and for ``waited_s`` all connections waited for room in the
    kernel. ``pace`` is 0 without a limit.
    """

    delivered: int
    outstanding: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    rtt_s: float = 0.0
    least_rtt_s: float = 0.0
    pace: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """Bytes per second that a path does at least and, where it was the limit, at most; 0 where nothing is known.

    ``stalled_s`` is how long nothing has arrived though something was on its way.
    """

    at_least: float = 0.0
    at_most: float = 0.0
    stalled_s: float = 0.0


class DeliveryWatch:
    """Observations of one peer. Time is handed in."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._before = Counts(0)
        self._limited_for_s = 0.0
        self._stalled_s = 0.0
        self._seen: deque[tuple[float, float, float]] = deque()

    def look(self, now: float, counts: Counts) -> None:
        """Take the counts as they are now. Looks less than 0.1 s apart are one."""
        took, before = now - self._looked_at, self._before
        if took < SHORTEST_S:
            return
        self._looked_at, self._before = now, counts
        delivered = max(0, counts.delivered - before.delivered)
        backlog = before.outstanding >= delivered + LEAST_BACKLOG
        limited = backlog or counts.waited_s - before.waited_s >= WAITING_SHARE * took
        grown = self._limited_for_s >= RAMP_RTTS * counts.least_rtt_s or _queues(counts)
        self._limited_for_s = self._limited_for_s + took if limited else 0.0
        stalls = before.outstanding and counts.outstanding and not delivered
        self._stalled_s = self._stalled_s + took if stalls else 0.0
        if delivered >= TELLING_BYTES:
            rate = delivered / took
            is_limit = limited and grown and not is_paced(rate, counts.pace)
            busy = max(counts.busy_s - before.busy_s, counts.least_rtt_s, SHORTEST_BUSY_S)
            self.saw(now, rate if is_limit else delivered / min(took, busy), rate if is_limit else 0.0)

    def saw(self, now: float, at_least: float, at_most: float) -> None:
        """One observation, from here or from a probe."""
        self._seen.append((now, at_least, at_most))
        self._forget(now)

    def told(self, now: float) -> Delivery:
        """What was seen lately: the newest limit, unless it was exceeded since, and the most that was carried since."""
        self._forget(now)
        at_least, limits = 0.0, deque[float](maxlen=LIMITS)
        for _, low, high in self._seen:
            if high:
                limits.append(high)
                at_least = low
            elif low > max(limits, default=0.0):
                limits.clear()
                at_least = max(at_least, low)
        at_most = sum(limits) / len(limits) if limits else 0.0
        return Delivery(min(at_least, at_most) if at_most else at_least, at_most, self._stalled_s)

    def _forget(self, now: float) -> None:
        while self._seen and self._seen[0][0] < now - KEEP_S:
            self._seen.popleft()


def is_paced(rate: float, pace: float) -> bool:
    """Whether a rate says more of the pace that was set (0: none) than of the path."""
    return bool(pace) and rate >= PACED_SHARE * pace


def _queues(counts: Counts) -> bool:
    return bool(counts.least_rtt_s) and counts.rtt_s >= QUEUEING * counts.least_rtt_s
