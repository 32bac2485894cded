"""Numbered batches of one source, put in order: what may be applied, what is missing, and when to stop waiting for it.

It does no I/O: whoever reads the source offers what came, asks for a replay while ``missing`` is set, and gives up
where the source has it no longer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class EventSequence(Generic[T]):
    """``applied`` is the number of the last batch that was handed out; -1 before the first.

    Batches that came early wait for those before them, at most ``max_waiting`` of at most ``max_waiting_bytes``; more
    of them mean that what is missing will not come, and ``overflowed`` is set.
    """

    def __init__(self, applied: int = -1, max_waiting: int = 4096, max_waiting_bytes: int = 16 << 20) -> None:
        self.applied = applied
        self.overflowed = False
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._newest_live = -1
        self._waiting: dict[int, tuple[T, int]] = {}
        self._waiting_bytes = 0

    @property
    def missing(self) -> int | None:
        """The first number that is missing before one that came; None while nothing is."""
        return self.applied + 1 if self._waiting else None

    def went_back(self, seq: int) -> bool:
        """Whether a live batch of this number shows that its source counts anew: live ones only ever go up."""
        return seq <= self._newest_live

    def offer(self, seq: int, batch: T, *, nbytes: int = 0, live: bool = True, resets: bool = False) -> list[T]:
        """Take a batch, which came as ``nbytes`` bytes; returns those to apply now, in order.

        ``resets`` says that it begins by clearing everything: whatever came before it has no meaning any more. A batch
        that is applied already is dropped.
        """
        if live:
            self._newest_live = max(self._newest_live, seq)
        if seq <= self.applied:
            return []
        if resets:
            for number in [number for number in self._waiting if number <= seq]:
                self._take(number)
            self.applied = seq - 1
        if seq in self._waiting:
            self._take(seq)
        self._waiting[seq] = batch, nbytes
        self._waiting_bytes += nbytes
        ready = self._ready()
        while len(self._waiting) > self._max_waiting or self._waiting_bytes > self._max_waiting_bytes:
            self.overflowed = True
            self._take(min(self._waiting))
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
            ready.append(self._take(self.applied))
        return ready

    def _take(self, seq: int) -> T:
        batch, nbytes = self._waiting.pop(seq)
        self._waiting_bytes -= nbytes
        return batch
