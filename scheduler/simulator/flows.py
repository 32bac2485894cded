"""One transfer: how much of it the prefill has let go at any moment, and how much has left.

A release curve is a polyline of (seconds, bytes): what was cached is let go at once, layers of a chunk evenly while it
is computed, and what becomes final only with the last chunk (its own tokens, windows and states) while that one is.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.simulator.jobs import Job


class Flow:
    """``total`` bytes over a link, of which ``last_bytes`` are let go in the last ``last_s`` before ``ends_at``.

    ``rate`` is what the link gives it now, ``cap`` what its codec can feed at most, ``peak`` its steepest release, inf
    where it has to be followed anyway.
    ``sent`` is right as of when its link last looked, and only on a link that is followed from bend to bend.
    """

    __slots__ = ("_at", "_points", "_resting", "began", "cap", "ends_at", "owner", "peak", "rate", "sent", "total")

    def __init__(
        self,
        owner: Job,
        began: float,
        ends_at: float,
        last_s: float,
        total: float,
        last_bytes: float,
        at_once: float = 0.0,
        cap: float | None = None,
    ) -> None:
        self.owner = owner
        self.began = began
        self.ends_at = ends_at
        self.total = total
        self.cap = inf if cap is None else cap
        self.sent = 0.0
        self.rate = 0.0
        before, bend = total - last_bytes, max(began, ends_at - last_s)
        at_once = min(at_once, before)
        first = (before - at_once) / (bend - began) if bend > began else inf if before > at_once else 0.0
        last = last_bytes / (ends_at - bend) if ends_at > bend else inf if last_bytes > 0 else 0.0
        self.peak = inf if at_once > 0 or self.cap < inf else max(first, last)
        self._points = [(began, at_once), (bend, before), (ends_at, total)]
        self._at = 0
        self._resting: list[tuple[float, float]] = []

    @property
    def released_at(self) -> float:
        """When the last byte was let go; inf while nobody knows."""
        return self.ends_at

    def released(self, now: float) -> float:
        """Bytes let go by now; ``now`` never falls."""
        at, points = self._seek(now), self._points
        if at + 1 >= len(points):
            return points[-1][1]
        (begin, less), (end, more) = points[at], points[at + 1]
        return less + (more - less) * (now - begin) / (end - begin)

    def slope(self, now: float) -> float:
        """Bytes per second that are being let go from now on."""
        at, points = self._seek(now), self._points
        if at + 1 >= len(points):
            return 0.0
        (begin, less), (end, more) = points[at], points[at + 1]
        return (more - less) / (end - begin)

    def bends_at(self, now: float) -> float:
        """When the slope changes next; inf where it does not."""
        at, points = self._seek(now), self._points
        return points[at + 1][0] if at + 1 < len(points) else inf

    def rest(self, now: float) -> None:
        """The prefill is set aside: nothing more is let go until ``resume``."""
        at, here = self._seek(now), self.released(now)
        self._resting = [(when - now, nbytes) for when, nbytes in self._points[at + 1 :]]
        self._points = [*self._points[: at + 1], (now, here)]
        self.ends_at = inf

    def resume(self, now: float) -> None:
        """The prefill goes on."""
        self._points.append((now, self._points[-1][1]))
        self._points += [(now + after, nbytes) for after, nbytes in self._resting]
        self._resting = []
        self.ends_at = self._points[-1][0]

    @property
    def complete(self) -> bool:
        """Whether everything has been let go, or will be without anybody resuming it."""
        return not self._resting

    def _seek(self, now: float) -> int:
        """The last point that is not after now, past stretches of no length."""
        points, at = self._points, self._at
        while at + 1 < len(points) and points[at + 1][0] <= now:
            at += 1
        self._at = at
        return at
