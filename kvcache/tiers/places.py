"""The tiers below one pool, and the moves that both spilling and reloading make there.

I/O runs in a few threads of its own: one that writes and unlinks, in order, and some that read. All else runs on the
event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvcache.blocks import Extent
from kvcache.hostpool import HostPool
from kvcache.kept import EntryKind
from kvcache.prefix_cache import PrefixCache
from kvcache.threadwork import ThreadWork
from kvcache.tiers.costs import Costs
from kvcache.tiers.index import Below, TierIndex
from kvcache.tiers.level import Level
from kvcache.tiers.telling import Telling

log = logging.getLogger(__name__)

READERS = 4


@dataclass(frozen=True, slots=True)
class Threads:
    """``settle`` each before the memory that they work on goes."""

    writer: ThreadWork
    readers: ThreadWork


class TierPlaces:
    """What is where, in the pool and below it. ``fingerprint`` is the digest of the model's; ``now`` any clock."""

    def __init__(
        self,
        levels: Sequence[Level],
        index: TierIndex,
        telling: Telling,
        costs: Costs,
        cache: PrefixCache,
        pool: HostPool,
        fingerprint: str,
        now: Callable[[], float],
    ) -> None:
        self.levels = levels
        self.index = index
        self.telling = telling
        self.costs = costs
        self.cache = cache
        self.pool = pool
        self.fingerprint = fingerprint
        self.now = now
        self._executors = (
            ThreadPoolExecutor(1, thread_name_prefix="kv-tier-write"),
            ThreadPoolExecutor(READERS, thread_name_prefix="kv-tier-read"),
        )
        self.threads = Threads(*(ThreadWork(executor) for executor in self._executors))
        telling.in_pool = cache.has
        telling.outdated = self.forget

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        """The memory of whole pool pages."""
        return self.pool.views(Extent(page, 0, self.pool.page_bytes) for page in pages)

    def find(self, name: bytes, kind: EntryKind) -> Below | None:
        """An entry below that can be had now."""
        entry = self.index.get(name, kind)
        if entry is None or not self.levels[entry.tier].health.can_read(self.now()):
            return None
        return entry

    def forget(self, entry: Below) -> None:
        """Let an entry go: it is not to be found any more, and its bytes go when the writer comes to it."""
        self.index.remove(entry)
        kept = self.cache.entry(*entry.key)
        if kept is not None:
            self.cache.copied(kept, False)
        self.telling.dropped(entry)
        self.unlink(self.levels[entry.tier], entry)

    def unlink(self, level: Level, entry: Below) -> None:
        """Have the bytes of a key go that nobody finds any more."""
        self.threads.writer.start(_drop, level, entry)

    def failed(self, level: Level, error: OSError) -> None:
        """A tier did not do what it should: it is left alone for a while."""
        before = level.health.failure
        level.health.failed(error, self.now())
        if level.health.failure != before:
            log.warning("tier %s %s", level.name, level.health.failure)

    async def settle(self) -> None:
        """Return when no thread touches the pool any more. What had not begun is given up."""
        await self.threads.writer.settle()
        await self.threads.readers.settle()
        for executor in self._executors:
            executor.shutdown(wait=False)


def _drop(level: Level, entry: Below) -> None:
    """Runs in the writer's thread. What cannot be unlinked is found and dropped when the node starts again."""
    try:
        level.store.drop(entry.key)
    except OSError as error:
        log.warning("tier %s: cannot drop: %s", level.name, error.strerror)
