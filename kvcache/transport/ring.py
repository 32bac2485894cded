"""A ring of memory between a writer and a reader that tell each other only how much. Sans-I/O.

Neither believes the other: more than there is room for, or more than was written, is refused. The reader takes copies,
so that what is checked is what is used.
"""

from __future__ import annotations

from collections.abc import Sequence

SHM = "shm"


class RingError(OSError):
    """The other side counts what cannot be."""


class RingWriter:
    """Fills memory of the reader's, as far as it has said that it is free."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.at = 0
        """Where the next byte goes."""
        self.outstanding = 0
        """Bytes written that the reader has not given back."""

    @property
    def room(self) -> int:
        """Bytes that can be written now."""
        return len(self._memory) - self.outstanding

    def put(self, views: Sequence[memoryview]) -> int:
        """Copy as much of ``views``, in order, as there is room for; returns how much."""
        total = 0
        for view in views:
            while view and self.room:
                count = min(len(view), self.room, len(self._memory) - self.at)
                self._memory[self.at : self.at + count] = view[:count]
                self.at = (self.at + count) % len(self._memory)
                self.outstanding += count
                total += count
                view = view[count:]
        return total

    def freed(self, count: int) -> None:
        """The reader has done with so much. Raises RingError for more than was written."""
        if not 0 < count <= self.outstanding:
            raise RingError(f"{count} bytes were given back, {self.outstanding} were written")
        self.outstanding -= count


class RingReader:
    """Takes out of its own memory what the writer says that it has put there."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0
        self.available = 0
        """Bytes that can be taken now."""
        self._taken = 0

    def arrived(self, count: int) -> None:
        """The writer has written so much. Raises RingError for more than it had room for."""
        if not 0 < count <= len(self._memory) - self.available - self._taken:
            raise RingError(f"{count} bytes came where there was no room for them")
        self.available += count

    def take(self, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers``, in order, with what is there; returns how much."""
        total = 0
        for buffer in buffers:
            while buffer and self.available:
                count = min(len(buffer), self.available, len(self._memory) - self._at)
                buffer[:count] = self._memory[self._at : self._at + count]
                self._at = (self._at + count) % len(self._memory)
                self.available -= count
                total += count
                buffer = buffer[count:]
        self._taken += total
        return total

    def give_back(self) -> int:
        """What the writer should be told is free: a quarter of the ring or more, or all that was taken when there is no
        more; 0 while it is not worth telling.
        """
        if self.available and self._taken < len(self._memory) // 4:
            return 0
        count, self._taken = self._taken, 0
        return count
