"""The runs of a prefix tree, who has which blocks of each, and what goes when there is no room.

A run is a stretch of blocks that follow each other. It begins after some block of another run, or at the root, or
floats: then the block before it is not known, and it counts for nothing until that block comes. Runs are never split: a
run with a hundred thousand branches is still one, and the way to the end of a prompt has as many steps as forks were
taken, not as there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from scheduler import coverage
from scheduler.block_table import BlockTable

BYTES_PER_BLOCK = 100
FEW = 8  # up to so many blocks are handled one by one

# What things cost, from resident memory: a block with the table half full, a run, a holder of a run.
_BLOCK_BYTES = 44
_RUN_BYTES = 460
_ENTRY_BYTES = 70
_LEAST_BYTES = 1 << 16  # what an index for a few blocks may take all the same

_SAMPLED = 16
_ERAS = 64


class Run(msgspec.Struct, gc=False, eq=False):
    """Blocks that follow each other, by slot. ``held`` and ``snapshots`` are coverages by holder.

    It begins after block ``at`` of ``parent``, or at the root, or after an unknown block called ``above``. ``forks``
    counts the runs that begin after each of its own blocks. References only point towards the root: no cycles.
    """

    ident: int
    slots: array[int]
    parent: Run | None
    at: int
    above: bytes | None
    used: int
    held: dict[int, int]
    snapshots: dict[int, int] | None = None
    forks: dict[int, int] | None = None

    @property
    def after_last_fork(self) -> int:
        """The first block that no other run needs."""
        return max(self.forks) + 1 if self.forks else 0

    @property
    def top(self) -> Run:
        """The run from which this one and its like branch off, at the root or floating."""
        run = self
        while run.parent is not None:
            run = run.parent
        return run


class Runs:
    """Holders are numbers. A retired one counts no more at once, and is swept out a few runs at a time.

    Bounded by ``capacity`` blocks, and where runs are short or have many holders by 100 bytes for each of these. Beyond
    it ends of runs go, after their last fork: of the next sixteen under a hand that goes round the one that was stored
    to or matched longest ago, to a sixty-fourth of the capacity stored since.
    """

    def __init__(self, capacity: int) -> None:
        self.table = BlockTable(capacity)
        self.all: list[Run | None] = []
        self.floating: dict[bytes, list[Run]] = {}  # by the name of the block that they wait for
        self.retired: set[int] = set()
        self.evicted = 0
        self._limit_bytes = capacity * BYTES_PER_BLOCK + _LEAST_BYTES
        self._idle: list[int] = []
        self._entries = 0
        self._era, self._stored = 0, 0
        self._hand, self._swept = 0, 0
        self._sweeping: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.all) - len(self._idle)

    @property
    def nbytes(self) -> int:
        """About what it all takes."""
        return len(self.table) * _BLOCK_BYTES + len(self) * _RUN_BYTES + self._entries * _ENTRY_BYTES

    def at(self, slot: int) -> Run:
        """The run of the block in ``slot``."""
        run = self.all[self.table.run_of[slot]]
        assert run is not None
        return run

    # -- growing

    def begin(self, parent: Run | None, at: int, above: bytes | None) -> Run:
        """An empty run after block ``at`` of ``parent``; with none at the root, or after an unknown block ``above``."""
        ident = self._idle.pop() if self._idle else len(self.all)
        run = Run(ident, array("I"), parent, at, None if parent else above, self._era, {})
        if ident == len(self.all):
            self.all.append(run)
        else:
            self.all[ident] = run
        if parent is not None:
            _fork(parent, at)
        elif above is not None:
            self.floating.setdefault(above, []).append(run)
        return run

    def extend(self, run: Run, names: Sequence[bytes]) -> None:
        """Add names that are unknown so far to the end of a run; there must be room for them."""
        first, blocks = len(run.slots), len(names)
        if blocks > FEW:
            offsets = np.arange(first, first + blocks, dtype=np.uint16)
            run.slots += self.table.add_many(b"".join(names), run.ident, offsets)
        else:
            run.slots.extend([self.table.add(name, run.ident, first + number) for number, name in enumerate(names)])
        self._stored += blocks
        if self._stored * _ERAS >= self.table.capacity:
            self._era, self._stored = self._era + 1, 0

    def fill(self, empty: Sequence[Run], blocks: Sequence[int], names: bytes) -> None:
        """Give empty runs so many blocks each, called ``names`` in their order; there must be room for them."""
        idents = np.repeat(np.array([run.ident for run in empty], np.uint32), blocks)
        offsets = np.concatenate([np.arange(count, dtype=np.uint16) for count in blocks])
        slots = self.table.add_many(names, idents, offsets)
        first = 0
        for run, count in zip(empty, blocks, strict=True):
            run.slots, first = slots[first : first + count], first + count

    def cover(self, run: Run, held: dict[int, int], snapshots: dict[int, int] | None) -> None:
        """Say who has what of a run of which nobody has anything."""
        run.held, run.snapshots = held, snapshots
        self._entries += len(held) + len(snapshots or ())

    def land(self, name: bytes, parent: Run, at: int) -> None:
        """Block ``at`` of ``parent`` came, called ``name``: runs that waited for it begin there."""
        top = parent.top
        landing = self.floating.pop(name)
        for run in landing:
            if run is not top:
                run.parent, run.at, run.above = parent, at, None
                _fork(parent, at)
        if top in landing:  # only names that do not follow each other go round in a circle
            self.floating[name] = [top]

    def mark(self, run: Run, values: dict[int, int], holder: int, start: int, stop: int) -> None:
        """Add blocks [start, stop) to what ``values`` of a run say of ``holder``."""
        value = values.get(holder, 0)
        self._entries += not value
        values[holder] = coverage.add(value, start, stop)
        run.used = self._era

    def touch(self, run: Run) -> None:
        """A prompt matched it."""
        run.used = self._era

    # -- shrinking

    def unmark(self, values: dict[int, int] | None, holder: int, block: int) -> bool:
        """Take one block from what ``values`` of a run say of ``holder``; whether it was there."""
        value = values.get(holder, 0) if values else 0
        if values is None or not coverage.holds(value, block):
            return False
        if left := coverage.without(value, block):
            values[holder] = left
        else:
            del values[holder]
            self._entries -= 1
        return True

    def trim(self, run: Run) -> None:
        """Forget the end of a run that nobody has, the run with its last block, and so on towards the root."""
        here: Run | None = run
        while here is not None:
            here = self._trimmed(here)

    def tidy(self, limit: int) -> bool:
        """Sweep ``limit`` runs of what retired holders had; whether anything is left to sweep."""
        for _ in range(limit):
            if not self.retired:
                return False
            if self._swept >= len(self.all):
                self.retired -= self._sweeping
                self._sweeping, self._swept = frozenset(self.retired), 0
                continue
            if (run := self.all[self._swept]) is not None:
                self.trim(run)
            self._swept += 1
        return bool(self.retired)

    def make_room(self, blocks: int, growing: Run | None, at: int) -> None:
        """Evict until ``blocks`` fit, but not block ``at`` of the run that grows. Two rounds give all there is."""
        if growing is not None:
            _fork(growing, at)
        steps = 2 * len(self.all)
        while steps > 0 and not self.fits(blocks):
            oldest: Run | None = None
            seen = 0
            while steps > 0 and seen < _SAMPLED:
                steps -= 1
                self._hand = self._hand + 1 if self._hand + 1 < len(self.all) else 0
                run = self.all[self._hand]
                if run is not None and len(run.slots) > run.after_last_fork:
                    seen += 1
                    if oldest is None or run.used < oldest.used:
                        oldest = run
            if oldest is not None:
                self._cut(oldest)
        if growing is not None:
            _join(growing, at)

    def fits(self, blocks: int) -> bool:
        """Whether as many more fit, in a run of their own."""
        more = blocks * _BLOCK_BYTES + _RUN_BYTES + _ENTRY_BYTES
        return blocks <= self.table.room and self.nbytes + more <= self._limit_bytes

    def _cut(self, run: Run) -> None:
        """Forget a run's blocks after its last fork, whoever has them."""
        before, keep = len(self.table), run.after_last_fork
        for values in _coverages(run):
            kept = {holder: left for holder, value in values.items() if (left := coverage.clip(value, keep))}
            self._entries -= len(values) - len(kept)
            values.clear()
            values.update(kept)
        self.trim(run)
        self.evicted += before - len(self.table)

    def _trimmed(self, run: Run) -> Run | None:
        """Forget a run's end; its parent, where nothing is left of it."""
        blocks, keep = len(run.slots), 0
        for values in _coverages(run):
            for holder in self.retired.intersection(values) if self.retired else ():
                del values[holder]
                self._entries -= 1
        if run.forks and blocks - 1 in run.forks:
            return None
        for values in _coverages(run):
            for value in values.values():
                keep = max(keep, coverage.extent(value))
                if keep == blocks:
                    return None
        keep = max(keep, run.after_last_fork)
        self.table.remove(run.slots[keep:])
        del run.slots[keep:]
        if keep:
            return None
        self.all[run.ident] = None
        self._idle.append(run.ident)
        if run.above is not None:
            self.floating[run.above].remove(run)
            if not self.floating[run.above]:
                del self.floating[run.above]
        if run.parent is not None:
            _join(run.parent, run.at)
        return run.parent


def _coverages(run: Run) -> tuple[dict[int, int], ...]:
    return (run.held,) if run.snapshots is None else (run.held, run.snapshots)


def _fork(parent: Run, at: int) -> None:
    if parent.forks is None:
        parent.forks = {}
    parent.forks[at] = parent.forks.get(at, 0) + 1


def _join(parent: Run, at: int) -> None:
    assert parent.forks is not None
    parent.forks[at] -= 1
    if not parent.forks[at]:
        del parent.forks[at]
