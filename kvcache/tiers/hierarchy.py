"""All tiers below one node's pool, as its node sees them: made before the cache, closed before the pool.

An entry lies in one tier at a time; what a tier has no room for sinks to the next one or is let go of. What fails is
as if it were not there, and is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from kvcache.background import in_background
from kvcache.chain import TokenChain
from kvcache.hostpool import HostPool
from kvcache.kept import StoredBlock
from kvcache.lease import Lease
from kvcache.prefix_cache import PrefixCache
from kvcache.quality import Quality
from kvcache.room import PageRoom
from kvcache.tiers.costs import Costs
from kvcache.tiers.index import TierIndex
from kvcache.tiers.level import Level
from kvcache.tiers.places import TierPlaces
from kvcache.tiers.reload import Reloader
from kvcache.tiers.report import TierReport
from kvcache.tiers.spill import Spiller
from kvcache.tiers.telling import MediumListener, Telling, parents_first, told

log = logging.getLogger(__name__)

CLOSE_PATIENCE_S = 10.0
SAFE_SHARE = 0.5


class Tiers:
    """The fastest first. ``costs.value`` and ``telling`` are for the cache, which is then given to ``attach``."""

    def __init__(
        self,
        levels: Sequence[Level],
        page_bytes: int,
        listener: MediumListener,
        prefill_tokens_per_s: Callable[[], float],
    ) -> None:
        self.costs = Costs(page_bytes, [level.speed for level in levels], prefill_tokens_per_s)
        self._levels = levels
        self._index = TierIndex([level.capacity for level in levels], lambda entry: entry.tokens / entry.nbytes)
        self.telling = Telling(listener, self._index, [level.store.medium for level in levels])
        self._running: asyncio.Task[None] | None = None

    def attach(
        self,
        cache: PrefixCache,
        room: PageRoom,
        pool: HostPool,
        fingerprint: str,
        now: Callable[[], float],
        *,
        snapshots: bool,
        safe_share: float = SAFE_SHARE,
    ) -> None:
        """To the cache whose entries they take, and give back; ``safe_share`` of its pool is to be free or copied."""
        places = TierPlaces(self._levels, self._index, self.telling, self.costs, cache, pool, fingerprint, now)
        self._places = places
        self._spiller = Spiller(places, safe_share)
        self._reloader = Reloader(places, room, snapshots=snapshots)

    def start(self) -> None:
        """Take over what an earlier process left, and begin to copy; both go on in the background."""
        self._running = in_background(self._spiller.run(), log, "tiers broke: nothing is copied any more")

    async def recovered(self) -> None:
        """Return once what an earlier process left can be found."""
        await self._spiller.recovered.wait()

    async def bring(
        self, chain: TokenChain, tokens: int, quality: Quality, deadline: float, *, resume: bool, needed: bool = False
    ) -> Lease | None:
        """As ``Reloader.bring``."""
        return await self._reloader.bring(chain, tokens, quality, deadline, resume=resume, needed=needed)

    @property
    def reports(self) -> tuple[TierReport, ...]:
        """Each tier as it is now."""
        index = self._index
        return tuple(
            level.report(index.used[number], index.counts[number]) for number, level in enumerate(self._levels)
        )

    def stored_in_files(self) -> Iterator[StoredBlock]:
        """Blocks that are in files and not in the pool, parents first."""
        return (told(entry) for entry in parents_first(self.telling.in_files()) if entry.is_block)

    def snapshots_in_files(self) -> Iterator[tuple[bytes, Quality]]:
        """The same of snapshots: the block at whose end each lies, and its quality."""
        entries = self.telling.in_files()
        return ((entry.hash, entry.provenance.quality) for entry in entries if not entry.is_block)

    async def close(self, keep: bool) -> None:
        """Stop all work and let go of what is held, but for files where they are to be kept. Idempotent.

        Whoever reloads must be at an end. A thread that hangs in the kernel is not waited for any longer than some
        seconds: the pool's memory stays until it is done.
        """
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self._places.settle()
                await self._reloader.close()
        for level in self._levels:
            level.store.close(keep)


@contextlib.asynccontextmanager
async def brought(
    tiers: Tiers | None,
    chain: TokenChain | None,
    tokens: int,
    quality: Quality,
    deadline: float,
    *,
    resume: bool,
    needed: bool = False,
) -> AsyncIterator[None]:
    """Within it a prompt's beginning is in the pool as ``Tiers.bring`` has it, unless somebody's turn needs its room.

    Nothing happens without tiers, or without a chain.
    """
    lease = None
    if tiers is not None and chain is not None:
        lease = await tiers.bring(chain, tokens, quality, deadline, resume=resume, needed=needed)
    try:
        yield
    finally:
        if lease is not None:
            lease.release()
