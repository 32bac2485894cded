"""Numbered batches of one source, put in order: what may be applied, what is missing, and when to stop waiting for it.

It does no I/O: whoever reads the source offers what came, asks for a replay while ``missing`` is set, and gives up
where the source has it no longer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class EventSequence(Generic[T]):
    """``applied`` is the number of the last batch that was handed out; -1 before the first.

    Batches that came early wait for those before them, at most ``max_waiting``; more of them mean that what is missing
    will not come, and ``overflowed`` is set.
    """

    def __init__(self, applied: int = -1, max_waiting: int = 4096) -> None:
        self.applied = applied
        self.overflowed = False
        self._max_waiting = max_waiting
        self._newest_live = -1
        self._waiting: dict[int, T] = {}

    @property
    def missing(self) -> int | None:
        """The first number that is missing before one that came; None while nothing is."""
        return self.applied + 1 if self._waiting else None

    def went_back(self, seq: int) -> bool:
        """Whether a live batch of this number shows that its source counts anew: live ones only ever go up."""
        return seq <= self._newest_live

    def offer(self, seq: int, batch: T, *, live: bool = True, resets: bool = False) -> list[T]:
        """Take a batch; returns those to apply now, in order.

        ``resets`` says that it begins by clearing everything: whatever came before it has no meaning any more. A batch
        that is applied already is dropped.
        """
        if live:
            self._newest_live = max(self._newest_live, seq)
        if seq <= self.applied:
            return []
        if resets:
            self._waiting = {number: kept for number, kept in self._waiting.items() if number > seq}
            self.applied = seq - 1
        self._waiting[seq] = batch
        ready = self._ready()
        if len(self._waiting) > self._max_waiting:
            self.overflowed = True
            del self._waiting[min(self._waiting)]
        return ready

    def give_up(self) -> list[T]:
        """What is missing will not come: go on with what did; returns the batches to apply now, in order.

        What the source held before them is unknown from here on.
        """
        self.overflowed = False
        if self._waiting:
            self.applied = min(self._waiting) - 1
        return self._ready()

    def _ready(self) -> list[T]:
        ready = []
        while self.applied + 1 in self._waiting:
            self.applied += 1
            ready.append(self._waiting.pop(self.applied))
        return ready
