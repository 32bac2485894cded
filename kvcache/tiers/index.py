"""What lies in which tier, how much room that takes, and what goes first. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcache.eviction import EvictionQueue
from kvcache.kept import EntryKind, Provenance
from kvcache.tiers.image import Image, Key

MOST_ENTRIES = 1 << 20
"""Of one tier: the index takes less than a kilobyte of memory for each."""


@dataclass(eq=False, slots=True)
class Below:
    """One block or snapshot in tier ``tier``, which is being read or moved while it has ``pins``.

    ``risen``: the pool has it, too. Its copy stays then: to let go of it would only make the pool copy it once more.
    """

    hash: bytes
    kind: EntryKind
    parent: bytes
    tokens: int
    pages: int
    nbytes: int
    provenance: Provenance
    digest: bytes
    tier: int
    risen: bool
    pins: int = 0
    floor: float = 0.0
    value: float = 0.0
    stamp: int = 0

    @property
    def key(self) -> Key:
        """Its name, and which of the two kinds it is."""
        return self.hash, self.kind

    @property
    def is_block(self) -> bool:
        """Whether it is no snapshot."""
        return self.kind is EntryKind.BLOCK


class TierIndex:
    """Entries of several tiers, each with a capacity in bytes; an entry is in one of them.

    ``worth`` is what losing an entry costs, for each byte. A tier lets go of leaves only: what others in it follow on
    is no use without them the other way round.
    """

    def __init__(self, capacities: list[int], worth: Callable[[Below], float]) -> None:
        self.capacities = capacities
        self.used = [0] * len(capacities)
        self.counts = [0] * len(capacities)
        self._entries: dict[Key, Below] = {}
        self._followers: dict[tuple[int, bytes], int] = {}
        self._queues = [EvictionQueue[Below](worth, self._may_go) for _ in capacities]

    def get(self, name: bytes, kind: EntryKind) -> Below | None:
        """The block, or the snapshot at its end."""
        return self._entries.get((name, kind))

    def __iter__(self) -> Iterator[Below]:
        return iter(self._entries.values())

    def has_room(self, tier: int, nbytes: int) -> bool:
        """Whether an entry of this size fits beside the others."""
        return self.used[tier] + nbytes <= self.capacities[tier] and self.counts[tier] < MOST_ENTRIES

    def add(self, image: Image, nbytes: int, tier: int, risen: bool) -> Below:
        """An image lies in a tier from now on; it was in none. ``risen``: and in the pool."""
        assert image.key not in self._entries
        entry = Below(
            image.hash,
            image.kind,
            image.parent,
            image.tokens,
            image.pages,
            nbytes,
            image.provenance,
            image.digest,
            tier,
            risen,
        )
        self._entries[entry.key] = entry
        self._place(entry)
        return entry

    def remove(self, entry: Below) -> None:
        """An entry is gone."""
        del self._entries[entry.key]
        self._displace(entry)

    def move(self, entry: Below, tier: int, nbytes: int) -> None:
        """An entry lies in another tier now, where it takes ``nbytes``."""
        self._displace(entry)
        entry.tier, entry.nbytes = tier, nbytes
        self._place(entry)

    def used_now(self, entry: Below) -> None:
        """It has been of use. Of a prompt's entries the last ones first: they go first, too."""
        queue = self._queues[entry.tier]
        queue.leave(entry)
        queue.touch(entry)
        queue.consider(entry)

    def rise(self, entry: Below, risen: bool) -> None:
        """The pool has the entry, too, or has it no more; then it is as if it had just been used."""
        entry.risen = risen
        self.used_now(entry)

    def pin(self, entry: Below, by: int) -> None:
        """Somebody reads it from now on (1), or no longer does (-1)."""
        entry.pins += by
        self._queues[entry.tier].consider(entry)

    def least(self, tier: int) -> Below | None:
        """What this tier should let go of next; None where all of it is in use. It stays in the index."""
        entry = self._queues[tier].pop()
        if entry is not None:
            self._queues[tier].consider(entry)
        return entry

    def check_integrity(self) -> None:
        """Raise AssertionError unless sizes, followers and queues agree."""
        for tier in range(len(self.capacities)):
            here = [entry for entry in self if entry.tier == tier]
            assert self.used[tier] == sum(entry.nbytes for entry in here), "bytes miscounted"
            assert self.counts[tier] == len(here), "entries miscounted"
            assert self.used[tier] <= self.capacities[tier], "more than fits"
        for entry in self:
            assert bool(entry.stamp) == self._may_go(entry), "the eviction queue holds other entries than may go"

    # ---- inside

    def _may_go(self, entry: Below) -> bool:
        followed = entry.is_block and self._followers.get((entry.tier, entry.hash))
        return entry.key in self._entries and not (entry.pins or entry.risen or followed)

    def _place(self, entry: Below) -> None:
        self.used[entry.tier] += entry.nbytes
        self.counts[entry.tier] += 1
        self._follow(entry, 1)
        self._queues[entry.tier].touch(entry)
        self._queues[entry.tier].consider(entry)

    def _displace(self, entry: Below) -> None:
        self.used[entry.tier] -= entry.nbytes
        self.counts[entry.tier] -= 1
        self._queues[entry.tier].leave(entry)
        self._follow(entry, -1)

    def _follow(self, entry: Below, by: int) -> None:
        place = entry.tier, entry.parent
        left = self._followers.pop(place, 0) + by
        if left:
            self._followers[place] = left
        above = self._entries.get((entry.parent, EntryKind.BLOCK))
        if above is not None and above.tier == entry.tier:
            self._queues[entry.tier].consider(above)
