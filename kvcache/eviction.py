"""The order in which a cache lets go of what nobody holds: the least valuable first, leaves before their parents."""

from __future__ import annotations

import heapq

from kvcache.kept import Block, Entry, Value

SPARE_PLACES = 1024


class EvictionQueue:
    """A heap of the entries that may go now. An entry's latest ``stamp`` is its only valid place in it; 0 is none."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._heap: list[tuple[float, int, Entry]] = []
        self._stamps = 0
        self._queued = 0
        self._floor = 0.0

    def touch(self, entry: Entry) -> None:
        """The entry was used just now: value it anew."""
        entry.value = self._value(entry.kind, entry.tokens, len(entry.pages), self._floor)

    def consider(self, entry: Entry) -> None:
        """Give the entry its place if it may go, and take it away if not."""
        free = not (entry.pins or entry.soft)
        if isinstance(entry, Block):
            free = free and not entry.children and entry.snapshot is None
        if not free:
            self.leave(entry)
        elif not entry.stamp:
            self._stamps += 1
            self._queued += 1
            entry.stamp = self._stamps
            heapq.heappush(self._heap, (entry.value, entry.stamp, entry))
            self._tidy()

    def leave(self, entry: Entry) -> None:
        """The entry may not go, or is gone."""
        if entry.stamp:
            entry.stamp = 0
            self._queued -= 1

    def pop(self) -> Entry | None:
        """The entry of least value that may go, None without any. What is used later is worth no less."""
        while self._heap:
            value, stamp, entry = heapq.heappop(self._heap)
            if entry.stamp == stamp:
                self.leave(entry)
                self._floor = max(self._floor, value)
                return entry
        return None

    def _tidy(self) -> None:
        """Places that are no longer valid must not outnumber the others for long."""
        if len(self._heap) > 2 * self._queued + SPARE_PLACES:
            self._heap = [place for place in self._heap if place[2].stamp == place[1]]
            heapq.heapify(self._heap)
