"""What one job leaves in its node's prefix cache: blocks of its page table, and what its engine offers.

Nothing here waits, and nothing is kept at the cost of another job: an offer is taken where there is room to spare. What
was kept out of the job's own table is held by its lease until the job ends, because others may still read it there.
"""

from __future__ import annotations

from engines.protocol import Checkpoint, Offered, StoreCommand, Stored
from engines.running import EngineRun
from kvcache.blocks import PageGeometry, PageTable
from kvcache.chain import TokenChain
from kvcache.checkpoints import CheckpointPolicy
from kvcache.kept import EntryKind, Provenance
from kvcache.lease import Lease
from kvcache.room import PageRoom
from kvcache.tables import block_pages, end_pages, needs_snapshots


def checkpoints(
    geometry: PageGeometry, policy: CheckpointPolicy, begin: int, exported: int | None, stop: int
) -> tuple[Checkpoint, ...]:
    """What a prefill of [begin, stop) should offer, of which tokens from ``exported`` on reach the pool anyway.

    That is all blocks before, and snapshots where ``policy`` wants them, but for one at ``stop``: windows and states
    are exported there. ``exported`` None says that nothing is.
    """
    block, limit = geometry.block_tokens, stop if exported is None else exported
    if not needs_snapshots(geometry):
        end = limit // block * block
        return (Checkpoint(begin, end, snapshot=False),) if end > begin else ()
    wanted = []
    at = begin
    for position in policy.positions(begin, stop, block):
        if at < limit < position:
            wanted.append(Checkpoint(at, limit, snapshot=False))
            at = limit
        if exported is None or position < stop:
            wanted.append(Checkpoint(at if position <= limit else position, position))
            at = max(at, position)
    return tuple(wanted)


class JobKeeper:
    """Keeps for one job; ``owner`` names it in the pool. The chain may grow while its answer is spoken.

    ``exports`` says that the blocks which offers follow reach the job's own table in the end, if they are not here yet.
    """

    def __init__(
        self,
        room: PageRoom,
        geometry: PageGeometry,
        owner: str,
        chain: TokenChain,
        lease: Lease,
        provenance: Provenance,
        exports: bool = False,
    ) -> None:
        assert room.cache is not None
        self.chain = chain
        self.provenance = provenance
        self._room = room
        self._cache = room.cache
        self._geometry = geometry
        self._owner = owner
        self._lease = lease
        self._exports = exports
        self._kept = lease.tokens
        self._asked: dict[int, tuple[Offered, PageTable]] = {}
        self._written: list[tuple[Offered, PageTable]] = []

    def keep_table(self, table: PageTable, tokens: int, done: bool) -> None:
        """Keep the full blocks below ``tokens`` of the job's own table, which the job may still read.

        Once it is ``done`` with its table, its end stays too where that is a block boundary.
        """
        self._keep_written()
        block = self._geometry.block_tokens
        first, stop = max(table.start, self._kept) // block, tokens // block
        if stop > first:
            pages = block_pages(table, first, stop)
            count = self._cache.keep(self._owner, self.chain, first, pages, self.provenance, self._lease)
            self._kept = (first + count) * block
        if done and tokens == table.stop and tokens % block == 0:
            self._cache.keep_snapshot(self._owner, self.chain, tokens, end_pages(table), self.provenance)
        self._keep_written()

    def offered(self, event: Offered, run: EngineRun) -> None:
        """Take an offer if there is room to spare, and if what comes before it is here or on its way.

        One of more tokens than the chain has is of something that nobody could name: it is declined.
        """
        block = self._geometry.block_tokens
        geometry = self._geometry if event.snapshot else self._geometry.blocks_only
        pages: tuple[int, ...] | None = None
        if event.stop <= len(self.chain.token_ids) and self._continues(event.start // block):
            pages = self._room.take_spare(self._name(event.stop), geometry.pages_for(event.start, event.stop))
        if pages is not None:
            self._asked[event.stop] = event, geometry.table(event.start, event.stop, pages)
        run.store(StoreCommand(event.job, event.stop, pages or ()))

    def stored(self, event: Stored) -> None:
        """What was offered lies in its pages, or does not."""
        asked = self._asked.pop(event.stop, None)
        if asked is None:
            return
        if event.written:
            self._written.append(asked)
            self._keep_written()
        else:
            self._room.release(self._name(event.stop))

    def close(self) -> None:
        """Give back what was not kept, once the engine has let go of the job. Idempotent."""
        self._keep_written()
        for stop in [*self._asked, *(event.stop for event, _ in self._written)]:
            self._room.release(self._name(stop))
        self._asked.clear()
        self._written.clear()

    def _continues(self, first: int) -> bool:
        above = self.chain.parent(first)
        waiting = self._exports or self._asked or self._written
        return above is None or self._cache.has(above, EntryKind.BLOCK) or bool(waiting)

    def _keep_written(self) -> None:
        """Keep what was written as far as the blocks before it are here by now."""
        left = []
        for event, table in self._written:
            if self._keep(event, table):
                self._room.release(self._name(event.stop))
            else:
                left.append((event, table))
        self._written = left

    def _keep(self, event: Offered, table: PageTable) -> bool:
        block = self._geometry.block_tokens
        first, stop = event.start // block, event.stop // block
        above = self.chain.parent(first)
        if above is not None and not self._cache.has(above, EntryKind.BLOCK):
            return False
        owner = self._name(event.stop)
        pages = block_pages(table, first, stop)
        self._cache.keep(owner, self.chain, first, pages, self.provenance, self._lease)
        if event.snapshot:
            self._cache.keep_snapshot(owner, self.chain, event.stop, end_pages(table), self.provenance)
        return True

    def _name(self, stop: int) -> str:
        return f"{self._owner}:{stop}"
