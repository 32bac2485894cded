"""Where each known block stands, by its 16-byte name: a chained hash table in flat arrays of a size fixed at the start.

A block has a slot; a slot has the block's name, the run it belongs to and its offset there. About 34 bytes a block, and
no Python object. The arrays are reserved whole, so that nothing is ever copied or hashed again while requests wait;
memory is used as slots are.

Every operation comes for one name and for many: one costs about a microsecond, and many cost a fraction of that each.
"""

from __future__ import annotations

from array import array
from struct import Struct, error

import numpy as np
from numpy.typing import NDArray

NAME_BYTES = 16
MAX_OFFSETS = 1 << 16

_PAIR = Struct("=QQ")

Slots = NDArray[np.uint32]


class BlockTable:
    """Names to slots. Slot 0 means "none"."""

    def __init__(self, capacity: int) -> None:
        """Room for ``capacity`` blocks. Raises ValueError below 1 or beyond what 32 bits can number."""
        if not 1 <= capacity < 1 << 32:
            raise ValueError(f"capacity must be 1 to {2**32 - 1} blocks, got {capacity}")
        self.capacity = capacity
        cells = 1 << max(4, (capacity - 1).bit_length())
        self._mask = cells - 1
        self._heads = np.zeros(cells, np.uint32)
        self._nexts = np.zeros(capacity + 1, np.uint32)
        self._names = np.zeros((capacity + 1, 2), np.uint64)
        self._runs = np.zeros(capacity + 1, np.uint32)
        self._offsets = np.zeros(capacity + 1, np.uint16)
        # One element of a memoryview costs a third of one of an array.
        self._head, self._next = self._heads.data, self._nexts.data
        self._name = self._names.reshape(-1).data
        self.run_of, self.offset_of = self._runs.data, self._offsets.data
        self._freed = array("I")
        self._top = 1

    def __len__(self) -> int:
        return self._top - 1 - len(self._freed)

    @property
    def room(self) -> int:
        """How many blocks can still be added."""
        return self.capacity - len(self)

    def find(self, name: bytes) -> int:
        """The slot of ``name``, or 0. Raises ValueError for a name that is not 16 bytes long."""
        try:
            low, high = _PAIR.unpack(name)
        except error:
            raise ValueError(f"a block's name is {NAME_BYTES} bytes, got {len(name)}") from None
        names, slot = self._name, self._head[low & self._mask]
        while slot:
            if names[2 * slot] == low and names[2 * slot + 1] == high:
                break
            slot = self._next[slot]
        found: int = slot
        return found

    def find_many(self, names: bytes) -> Slots:
        """The slot of each of the joined ``names``, or 0."""
        wanted = np.frombuffer(names, np.uint64).reshape(-1, 2)
        slots = self._heads[self._cells(wanted)]
        pending = np.flatnonzero(slots)
        while len(pending):
            wrong = (self._names[slots[pending]] != wanted[pending]).any(axis=1)
            pending = pending[wrong]
            slots[pending] = self._nexts[slots[pending]]
            pending = pending[slots[pending] != 0]
        return slots

    def names(self, slots: array[int]) -> bytes:
        """The joined names of ``slots``."""
        return self._names[np.frombuffer(slots, np.uint32)].tobytes()

    def equals(self, slot: int, name: bytes) -> bool:
        """Whether the block in ``slot`` is called ``name``."""
        low, high = _PAIR.unpack(name)
        return bool(self._name[2 * slot] == low and self._name[2 * slot + 1] == high)

    def add(self, name: bytes, run: int, offset: int) -> int:
        """Give a name that has none a slot. There must be room."""
        low, high = _PAIR.unpack(name)
        if self._freed:
            slot = self._freed.pop()
        else:
            slot, self._top = self._top, self._top + 1
        cell = low & self._mask
        self._name[2 * slot], self._name[2 * slot + 1] = low, high
        self.run_of[slot], self.offset_of[slot] = run, offset
        self._next[slot], self._head[cell] = self._head[cell], slot
        return slot

    def add_many(self, names: bytes, runs: int | NDArray[np.uint32], offsets: NDArray[np.uint16]) -> array[int]:
        """Give distinct names that have none a slot each, in their order. There must be room."""
        wanted = np.frombuffer(names, np.uint64).reshape(-1, 2)
        slots = self._take(len(wanted))
        taken = np.frombuffer(slots, np.uint32)
        self._names[taken] = wanted
        self._runs[taken], self._offsets[taken] = runs, offsets
        cells = self._cells(wanted)
        while len(taken):  # of several for one cell the last one written stays at its head; the others go again
            self._nexts[taken] = self._heads[cells]
            self._heads[cells] = taken
            again = self._heads[cells] != taken
            taken, cells = taken[again], cells[again]
        return slots

    def remove(self, slots: array[int]) -> None:
        """Take these blocks out."""
        self._freed.extend(slots)
        if len(slots) < 24:
            for slot in slots:
                self._unlink(slot)
            return
        taken = np.frombuffer(slots, np.uint32)
        cells = self._cells(self._names[taken])
        while len(taken):  # each round takes one block out of each chain
            _, first = np.unique(cells, return_index=True)
            self._unlink_many(taken[first], cells[first])
            rest = np.ones(len(taken), bool)
            rest[first] = False
            taken, cells = taken[rest], cells[rest]

    def _cells(self, names: NDArray[np.uint64]) -> NDArray[np.uint64]:
        cells: NDArray[np.uint64] = names[:, 0] & np.uint64(self._mask)
        return cells

    def _take(self, wanted: int) -> array[int]:
        again = min(wanted, len(self._freed))
        slots = self._freed[len(self._freed) - again :]
        del self._freed[len(self._freed) - again :]
        fresh = wanted - again
        slots.frombytes(np.arange(self._top, self._top + fresh, dtype=np.uint32).tobytes())
        self._top += fresh
        return slots

    def _unlink(self, slot: int) -> None:
        cell = self._name[2 * slot] & self._mask
        before, here = 0, self._head[cell]
        while here != slot:
            before, here = here, self._next[here]
        if before:
            self._next[before] = self._next[slot]
        else:
            self._head[cell] = self._next[slot]

    def _unlink_many(self, slots: Slots, cells: NDArray[np.uint64]) -> None:
        before, here = np.zeros_like(slots), self._heads[cells]
        while True:
            further = np.flatnonzero(here != slots)
            if not len(further):
                break
            before[further] = here[further]
            here[further] = self._nexts[here[further]]
        inside = before != 0
        self._nexts[before[inside]] = self._nexts[slots[inside]]
        self._heads[cells[~inside]] = self._nexts[slots[~inside]]
