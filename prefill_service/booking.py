"""What one export takes of the pool before it begins: a cached prefix to go on from, and pages for all else."""

from __future__ import annotations

from kvcache.blocks import PageTable
from kvcache.chain import TokenChain
from kvcache.lease import Lease
from kvcache.quality import Quality
from kvcache.room import PageRoom
from kvcache.tables import compose, fresh_pages, leased_table
from kvcache.ticket import Ticket
from prefill_service.context import ServiceContext


class Booking:
    """The pages of a transfer of tokens [start, stop), of which the first blocks may be cached ones.

    What is cached is looked up when the pages are granted, not before: a job that waits holds nothing, so waiting jobs
    cannot keep each other from running, and a prefix that came while it waited counts.
    """

    def __init__(
        self, context: ServiceContext, owner: str, ticket: Ticket, quality: Quality, chain: TokenChain | None
    ) -> None:
        """``chain`` is that of the tokens below ``ticket.stop``, None where nothing is cached here."""
        self._room: PageRoom = context.room
        self._geometry = context.geometry
        self._owner = owner
        self._start = ticket.start
        self._stop = ticket.stop
        self._quality = quality
        self._chain = chain
        self._lease: Lease | None = None
        self._table: PageTable | None = None

    @property
    def table(self) -> PageTable:
        """Where the export goes; its blocks below ``cached_tokens`` are cached ones."""
        assert self._table is not None, "booked first"
        return self._table

    @property
    def lease(self) -> Lease | None:
        """The cached prefix, which may be empty; None where this node caches nothing."""
        return self._lease

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be computed: a multiple of the block size below ``stop``."""
        return 0 if self._lease is None else self._lease.tokens

    @property
    def cached_pages(self) -> tuple[int, ...]:
        """The table of [0, ``cached_tokens``)."""
        return () if self._lease is None or not self.cached_tokens else leased_table(self._geometry, self._lease).pages

    async def book(self, deadline: float, rank: int = 0) -> None:
        """Wait for the pages, the least rank first. Raises RoomCrowded and RoomTimeout as ``PageRoom.acquire`` does."""
        most = self._geometry.pages_for(self._start, self._stop)
        pages = await self._room.acquire_by(self._owner, most, self._attempt, deadline, rank)
        first = self._start // self._geometry.block_tokens
        shared = [] if self._lease is None else self._lease.blocks[first:]
        self._table = compose(self._geometry, self._start, self._stop, shared, pages)

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self._room.release(self._owner)
        if self._lease is not None:
            self._lease.release()

    def _attempt(self) -> tuple[int, ...] | None:
        """Take the pages with the longest cached prefix, or with none: a prefix must not be why a job does not fit."""
        cache, chain = self._room.cache, self._chain
        if cache is None or chain is None:
            return self._take(0)
        names = chain.hashes[: (self._stop - 1) // self._geometry.block_tokens]
        found = cache.match(names, self._quality).resumable
        for tokens in (found, 0) if found else (0,):
            self._lease = cache.lease(names, tokens, self._quality, resume=True)
            assert self._lease is not None, "it was matched just now"
            pages = self._take(tokens)
            if pages is not None:
                cache.used(self._lease)
                return pages
            self._lease.release()
        return None

    def _take(self, cached: int) -> tuple[int, ...] | None:
        shared = max(0, cached - self._start) // self._geometry.block_tokens
        return self._room.take(self._owner, fresh_pages(self._geometry, self._start, self._stop, shared))
