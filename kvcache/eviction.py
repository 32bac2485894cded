"""The order in which something lets go of what nobody holds: the least valuable first, by what may go now.

GreedyDual-Size (Cao, Irani 1997): an entry's value is what losing it costs per page, above the highest value that went
so far when the entry was last used. What is not used ages, the faster the cheaper it is to have again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

SPARE_PLACES = 1024


class Evictable(Protocol):
    """``stamp`` is an entry's place in the queue, 0 for none; ``floor`` the highest value gone at its last use."""

    floor: float
    value: float
    stamp: int


E = TypeVar("E", bound=Evictable)


class EvictionQueue(Generic[E]):
    """A heap of the entries that may go now. An entry's latest ``stamp`` is its only valid place in it.

    ``worth`` says what losing an entry costs, ``may_go`` whether nothing keeps it.
    """

    def __init__(self, worth: Callable[[E], float], may_go: Callable[[E], bool]) -> None:
        self._worth = worth
        self._may_go = may_go
        self._heap: list[tuple[float, int, E]] = []
        self._stamps = 0
        self._queued = 0
        self._floor = 0.0

    def touch(self, entry: E) -> None:
        """The entry was used just now: value it anew."""
        entry.floor = self._floor
        entry.value = self._floor + self._worth(entry)

    def revalue(self, entry: E) -> None:
        """Losing the entry costs more or less than before; it was not used for that."""
        entry.value = entry.floor + self._worth(entry)
        if entry.stamp:
            self.leave(entry)
            self.consider(entry)

    def consider(self, entry: E) -> None:
        """Give the entry its place if it may go, and take it away if not."""
        if not self._may_go(entry):
            self.leave(entry)
        elif not entry.stamp:
            self._stamps += 1
            self._queued += 1
            entry.stamp = self._stamps
            heapq.heappush(self._heap, (entry.value, entry.stamp, entry))
            self._tidy()

    def leave(self, entry: E) -> None:
        """The entry may not go, or is gone."""
        if entry.stamp:
            entry.stamp = 0
            self._queued -= 1

    def pop(self) -> E | None:
        """The entry of least value that may go, None without any. What is used later is worth no less."""
        while self._heap:
            value, stamp, entry = heapq.heappop(self._heap)
            if entry.stamp == stamp:
                self.leave(entry)
                self._floor = max(self._floor, value)
                return entry
        return None

    def least(self, wanted: Callable[[E], bool]) -> E | None:
        """Of the entries that may go and are ``wanted`` the one of least value; it stays. Looks at all of them."""
        places = (place for place in self._heap if place[2].stamp == place[1] and wanted(place[2]))
        place = min(places, key=lambda each: each[:2], default=None)
        return None if place is None else place[2]

    def _tidy(self) -> None:
        """Places that are no longer valid must not outnumber the others for long."""
        if len(self._heap) > 2 * self._queued + SPARE_PLACES:
            self._heap = [place for place in self._heap if place[2].stamp == place[1]]
            heapq.heapify(self._heap)
