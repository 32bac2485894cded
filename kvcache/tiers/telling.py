"""Telling of changes in the pool and below it as one: each block is told on the medium from which it would come.

A move is told as stored there and then removed here. Who only asks whether the node has a block loses it by no move, as
long as a removal from a medium where it no longer is counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvcache.held import FILES
from kvcache.kept import EntryKind, StoredBlock
from kvcache.quality import Quality
from kvcache.tiers.index import Below, TierIndex

MEMORY = "CPU"


class MediumListener(Protocol):
    """A ``CacheListener`` that also hears of media; the calls without one are of the pool."""

    def stored(self, blocks: Sequence[StoredBlock], medium: str = MEMORY) -> None:
        """Blocks can be used from now on, parents first. Those in files come without their tokens."""

    def snapshot(self, hash: bytes, quality: Quality, medium: str = MEMORY) -> None:
        """Windows and states at the end of block ``hash`` can be used from now on."""

    def removed(self, hashes: Sequence[bytes], kind: EntryKind, medium: str = MEMORY) -> None:
        """These blocks, or the snapshots at their ends, are gone from there."""


class Telling:
    """The pool's ``CacheListener``, and told of what changes below; ``media`` are those of the tiers.

    ``in_pool`` says whether the pool has a block or snapshot; ``kept`` is called when it has got something,
    ``outdated`` where that is more exact than what lies below.
    """

    def __init__(self, listener: MediumListener, index: TierIndex, media: Sequence[str]) -> None:
        self._listener = listener
        self._index = index
        self._media = media
        self.in_pool: Callable[[bytes, EntryKind], bool] = lambda name, kind: False
        self.kept: Callable[[], None] = lambda: None
        self.outdated: Callable[[Below], None] = lambda entry: None

    # ---- the pool

    def stored(self, blocks: Sequence[StoredBlock]) -> None:
        """Blocks are in the pool."""
        self._listener.stored(blocks)
        risen = [block.hash for block in blocks if self._rise(block.hash, EntryKind.BLOCK, block.quality)]
        if risen:
            self._listener.removed(risen, EntryKind.BLOCK, FILES)
        self.kept()

    def snapshot(self, hash: bytes, quality: Quality) -> None:
        """A snapshot is in the pool."""
        self._listener.snapshot(hash, quality)
        if self._rise(hash, EntryKind.SNAPSHOT, quality):
            self._listener.removed([hash], EntryKind.SNAPSHOT, FILES)
        self.kept()

    def removed(self, hashes: Sequence[bytes], kind: EntryKind) -> None:
        """The pool has let go of something; what a tier of memory holds has not gone anywhere, as others see it."""
        below = {name: self._index.get(name, kind) for name in hashes}
        for entry in below.values():
            if entry is not None:
                self._index.rise(entry, False)
        sunk = [entry for entry in below.values() if entry is not None and self._media[entry.tier] == FILES]
        self._store(sunk)
        gone = [name for name, entry in below.items() if entry is None or self._media[entry.tier] == FILES]
        if gone:
            self._listener.removed(gone, kind, MEMORY)

    # ---- below

    def recovered(self, entries: Sequence[Below]) -> None:
        """These lie in a tier since before this process, parents first."""
        self._store([entry for entry in entries if not self.in_pool(*entry.key)])

    def sunk(self, entry: Below) -> None:
        """An entry was moved from a tier of memory to one of files."""
        if not self.in_pool(*entry.key):
            self._store([entry])
            self._listener.removed([entry.hash], entry.kind, MEMORY)

    def dropped(self, entry: Below) -> None:
        """An entry is in no tier any more."""
        if not self.in_pool(*entry.key):
            self._listener.removed([entry.hash], entry.kind, self._media[entry.tier])

    def in_files(self) -> list[Below]:
        """What is told as lying in files now."""
        return [entry for entry in self._index if self._media[entry.tier] == FILES and not self.in_pool(*entry.key)]

    # ---- inside

    def _rise(self, name: bytes, kind: EntryKind, quality: Quality) -> bool:
        """The pool has something; whether that is no longer to be told as in files.

        Only exact ones are told; a better one in files than in the pool stays told as in files.
        """
        entry = self._index.get(name, kind)
        if entry is None:
            return False
        if not quality.allows(entry.provenance.quality):
            self.outdated(entry)
            return False
        self._index.rise(entry, True)
        return self._media[entry.tier] == FILES and quality is Quality.EXACT

    def _store(self, entries: Sequence[Below]) -> None:
        blocks = [told(entry) for entry in entries if entry.is_block]
        if blocks:
            self._listener.stored(blocks, FILES)
        for entry in entries:
            if not entry.is_block:
                self._listener.snapshot(entry.hash, entry.provenance.quality, FILES)


def told(entry: Below) -> StoredBlock:
    """A block below as a listener is told of it: without its tokens, which are known where it was stored first."""
    return StoredBlock(entry.hash, entry.parent or None, (), "", "", entry.provenance.quality)


def parents_first(entries: Sequence[Below]) -> Iterator[Below]:
    """In an order in which none comes before the block that it follows on, as far as that is among them."""
    blocks = {entry.hash for entry in entries if entry.is_block}
    waiting: dict[bytes, list[Below]] = {}
    ready = []
    for entry in entries:
        if entry.parent in blocks:
            waiting.setdefault(entry.parent, []).append(entry)
        else:
            ready.append(entry)
    while ready:
        entry = ready.pop()
        yield entry
        if entry.is_block:
            ready += waiting.pop(entry.hash, [])
