"""Simulated time: a heap of events, each of which knows what it does. Nothing here knows what is simulated.

Events of one moment fire in the order in which they were scheduled, so equal inputs give equal runs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Protocol


class Event(Protocol):
    """Something that happens at one moment."""

    def fire(self, now: float) -> None:
        """Let it happen."""
        ...


class Clock:
    """``now`` in seconds, and what is still to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fired = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._scheduled = 0

    def at(self, when: float, event: Event) -> None:
        """Let ``event`` fire at ``when``, which is not before now."""
        assert when >= self.now, f"{event} at {when}, which is before {self.now}"
        self._scheduled += 1
        heappush(self._heap, (when, self._scheduled, event))

    def run(self, until: float = inf, most: int | None = None) -> bool:
        """Fire what is due up to ``until``, at most so many events. False once nothing is left up to then."""
        heap, left = self._heap, -1 if most is None else most
        while heap and left:
            when, _, event = heap[0]
            if when > until:
                return False
            heappop(heap)
            self.now = when
            event.fire(when)
            self.fired += 1
            left -= 1
        return bool(heap)
