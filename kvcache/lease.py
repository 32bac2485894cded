"""A hold on a prefix that a cache keeps: what it covers is neither evicted nor replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcache.kept import Block, Entry, Snapshot
from kvcache.quality import Quality

_LEVELS = tuple(Quality)


class LeaseHolder(Protocol):
    """The cache as its leases see it."""

    block_tokens: int

    def hold(self, lease: Lease, entries: Sequence[Entry], firm: bool) -> None:
        """A lease begins."""

    def let_go(self, lease: Lease, entries: Sequence[Entry], firm: bool) -> None:
        """A lease ends."""

    def find(self, hashes: Sequence[bytes]) -> list[Block]:
        """The blocks of these names, as far as they are kept."""

    def told_freed(self) -> None:
        """Pages may have become evictable."""


class Lease:
    """A prefix that stays while it is held; made by ``PrefixCache.lease``. Its pages may be read, never written."""

    def __init__(
        self, cache: LeaseHolder, blocks: Sequence[Block], snapshot: Snapshot | None, revoked: Callable[[], None] | None
    ) -> None:
        self.tokens = len(blocks) * cache.block_tokens
        self.blocks = tuple(block.pages for block in blocks)
        """Pages of each block, in the order of the geometry's FULL layers."""
        self.snapshot = () if snapshot is None else snapshot.pages
        """Pages of windows and states at ``tokens``; empty where none were asked for."""
        self._cache = cache
        self._entries: tuple[Entry, ...] = tuple(blocks) if snapshot is None else (*blocks, snapshot)
        self._reach = len(blocks)
        self.quality = max(
            (entry.provenance.quality for entry in self._entries), key=_LEVELS.index, default=Quality.EXACT
        )
        """The strictest level that may use all of it."""
        self._revoked = revoked
        self._held = False
        self._firm = revoked is None
        self._hold()

    @property
    def gone(self) -> bool:
        """Whether it was released or revoked."""
        return not self._held

    def firm(self) -> bool:
        """Make a soft lease one that cannot be revoked. False where it is gone already."""
        return self._turn(True)

    def soften(self) -> bool:
        """Make it soft again. False where it is gone already."""
        assert self._revoked is not None, "this lease was never soft"
        return self._turn(False)

    def grow(self, hashes: Sequence[bytes]) -> None:
        """Hold the prefix of these blocks, of which it holds the first already. Nothing happens where it is gone.

        What the lease says of itself stays: this only keeps them from going. All of them are held, not the last ones
        alone: a block that cannot go because of those behind it must not count as one that can.
        """
        if self._held:
            found = self._cache.find(hashes[self._reach :])
            self._reach += len(found)
            self._entries = (*self._entries, *found)
            self._cache.hold(self, found, self._firm)

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._drop():
            self._cache.told_freed()

    def revoke(self) -> None:
        """Let go of a soft lease on the cache's behalf, and tell its holder."""
        assert not self._firm
        assert self._revoked is not None
        if self._drop():
            self._revoked()

    def _turn(self, firm: bool) -> bool:
        if self._held and firm != self._firm:
            self._drop()
            self._firm = firm
            self._hold()
        return self._held

    def _hold(self) -> None:
        self._held = True
        self._cache.hold(self, self._entries, self._firm)

    def _drop(self) -> bool:
        if not self._held:
            return False
        self._held = False
        self._cache.let_go(self, self._entries, self._firm)
        return True
