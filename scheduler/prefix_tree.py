"""The prompts that an index knows, as a tree of runs: stored by name, removed by name, and matched.

A block's name covers all before it, so equal names have equal pasts: where the name at position p is known and its run
hangs on the root, everything before p is known too. That is what lets ``path`` bisect instead of comparing a prompt
block by block. It holds for all honest senders. One that strings names together that do not follow each other makes
blocks be looked for where they are not: prompts through these blocks match less, or more, than they should until its
own end. As a match is an estimate, that costs detours and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.block_table import MAX_OFFSETS, NAME_BYTES
from scheduler.prefix_runs import FEW, Run, Runs

_SWEPT_PER_STORE = 8


class PrefixTree:
    """Names of blocks over ``Runs``."""

    def __init__(self, capacity: int) -> None:
        self.runs = Runs(capacity)
        self.table = self.runs.table

    def path(self, names: Sequence[bytes]) -> list[tuple[Run, int]]:
        """The longest known beginning of ``names``: runs from the root on, with how many blocks of each it takes."""
        slot, blocks = self._deepest(names)
        if not slot:
            return []
        found: list[tuple[Run, int]] = []
        run: Run | None = self.runs.at(slot)
        upto = self.table.offset_of[slot] + 1
        while run is not None:
            self.runs.touch(run)
            found.append((run, upto))
            blocks -= upto
            upto, run = run.at + 1, run.parent
        if blocks:  # names that do not follow each other
            return []
        found.reverse()
        return found

    def store(self, holder: int, names: Sequence[bytes], parent: bytes | None) -> int:
        """``holder`` has ``names``, which follow each other and ``parent``. Returns how many there was room for."""
        self.runs.tidy(_SWEPT_PER_STORE)
        lengths = set(map(len, names))
        if lengths - {NAME_BYTES}:
            raise ValueError(f"a block's name is {NAME_BYTES} bytes, got {min(lengths - {NAME_BYTES})}")
        run, at, above = self._after(parent)
        done = 0
        while done < len(names):
            if run is not None and (known := self._follow(run, at + 1, names, done)):
                self.runs.mark(run, run.held, holder, at + 1, at + 1 + known)
                at, done = at + known, done + known
            elif slot := self.table.find(names[done]):
                run, at = self.runs.at(slot), self.table.offset_of[slot] - 1
            else:
                stop = self._first_known(names, done + 1)
                run, at, added = self._append(holder, names[done:stop], run, at, above)
                if not added:
                    break
                done += added
        return done

    def remove(self, holder: int, names: Sequence[bytes]) -> None:
        """``holder`` has no longer these blocks. Those that it was not known to have do not matter."""
        touched: dict[int, Run] = {}
        for name in names:
            if slot := self.table.find(name):
                run = self.runs.at(slot)
                if self.runs.unmark(run.held, holder, self.table.offset_of[slot]):
                    touched[run.ident] = run
        self._trim(touched)

    def snapshot(self, holder: int, name: bytes) -> None:
        """``holder`` can resume after this block. After a block that is not known, nobody can."""
        if slot := self.table.find(name):
            run, offset = self.runs.at(slot), self.table.offset_of[slot]
            if run.snapshots is None:
                run.snapshots = {}
            self.runs.mark(run, run.snapshots, holder, offset, offset + 1)

    def remove_snapshots(self, holder: int, names: Sequence[bytes]) -> None:
        """``holder`` can no longer resume after these blocks."""
        touched: dict[int, Run] = {}
        for name in names:
            if slot := self.table.find(name):
                run = self.runs.at(slot)
                if self.runs.unmark(run.snapshots, holder, self.table.offset_of[slot]):
                    touched[run.ident] = run
        self._trim(touched)

    def _trim(self, touched: dict[int, Run]) -> None:
        for ident, run in touched.items():
            if self.runs.all[ident] is run:
                self.runs.trim(run)

    def _deepest(self, names: Sequence[bytes]) -> tuple[int, int]:
        """The slot of the last known name that hangs on the root, and how many names that makes; zeros with none.

        Along a run as far as it goes, then with the run that begins there. At each such fork one probe halfway halves
        what is left, so that neither long runs nor many forks take more than a few dozen comparisons.
        """
        if not names or not (slot := self._rooted(names[0])):
            return 0, 0
        known, stop = 1, len(names)
        while True:
            run, offset = self.runs.at(slot), self.table.offset_of[slot]
            if more := self._along(run, offset + 1, names, known, stop):
                known += more
                slot = run.slots[offset + more]
            if known == stop or not (following := self._rooted(names[known])):
                return slot, known
            middle = (known + stop) // 2
            if middle > known and (further := self._rooted(names[middle])):
                slot, known = further, middle + 1
            else:
                stop = max(middle, known + 1)
                slot, known = following, known + 1

    def _rooted(self, name: bytes) -> int:
        """The slot of a known name that hangs on the root, or 0."""
        slot = self.table.find(name)
        if slot and self.runs.floating and self.runs.at(slot).top.above is not None:
            return 0
        return slot

    def _along(self, run: Run, offset: int, names: Sequence[bytes], begin: int, stop: int) -> int:
        """How many names from ``begin`` to ``stop`` are those of the run from ``offset`` on, by bisection."""
        slots, equals = run.slots, self.table.equals
        low, high = 0, min(len(slots) - offset, stop - begin)
        if high > 0 and equals(slots[offset + high - 1], names[begin + high - 1]):
            return high
        while low < high:
            middle = (low + high) // 2
            if equals(slots[offset + middle], names[begin + middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _after(self, parent: bytes | None) -> tuple[Run | None, int, bytes | None]:
        """Where blocks after ``parent`` belong: run, offset of the parent there, and its name where it is unknown."""
        if parent is None:
            return None, -1, None
        slot = self.table.find(parent)
        return (self.runs.at(slot), self.table.offset_of[slot], None) if slot else (None, -1, parent)

    def _follow(self, run: Run, offset: int, names: Sequence[bytes], begin: int) -> int:
        """How many of the names from ``begin`` on are those of the run from ``offset`` on."""
        length = min(len(run.slots) - offset, len(names) - begin)
        if length > FEW:
            known = self.table.names(run.slots[offset : offset + length])
            wanted = b"".join(names[begin : begin + length])
            if known == wanted:
                return length
            return int(np.argmin(np.frombuffer(known, np.uint64) == np.frombuffer(wanted, np.uint64))) // 2
        for number in range(length):
            if not self.table.equals(run.slots[offset + number], names[begin + number]):
                return number
        return length

    def _first_known(self, names: Sequence[bytes], begin: int) -> int:
        """The first of the names from ``begin`` on that is known, or how many names there are."""
        if len(names) - begin > FEW:
            known = np.flatnonzero(self.table.find_many(b"".join(names[begin:])))
            return begin + int(known[0]) if len(known) else len(names)
        return next((n for n in range(begin, len(names)) if self.table.find(names[n])), len(names))

    def _append(
        self, holder: int, names: Sequence[bytes], run: Run | None, at: int, above: bytes | None
    ) -> tuple[Run | None, int, int]:
        """Add unknown ``names`` after block ``at`` of ``run``; where that ends, and how many were added."""
        if not self.runs.fits(len(names)):
            self.runs.make_room(len(names), run, at)
            names = names[: self.table.room]
            if not names:
                return run, at, 0
        if run is None or at != len(run.slots) - 1 or len(run.slots) == MAX_OFFSETS:
            run = self.runs.begin(run, at, above)
        first = len(run.slots)
        names = names[: MAX_OFFSETS - first]
        self.runs.extend(run, names)
        self.runs.mark(run, run.held, holder, first, first + len(names))
        if self.runs.floating:
            for number, name in enumerate(names, first):
                if name in self.runs.floating:
                    self.runs.land(name, run, number)
        return run, first + len(names) - 1, len(names)
