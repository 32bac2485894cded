"""One cached prefix being sent to another prefill node: nothing is computed, and no page is taken for it."""

from __future__ import annotations

from kvcache.chain import TokenChain
from kvcache.fate import JobEnded
from kvcache.lease import Lease
from kvcache.plan import TransferPlan
from kvcache.tables import compose
from kvcache.tiers.hierarchy import brought
from prefill_service.transmission import Transmission


class Share(Transmission):
    """A transfer of kept pages, which its lease holds until the wire and the encoding threads have let go of them."""

    _lease: Lease | None = None

    @property
    def waiting(self) -> bool:
        """It never waits for room."""
        return False

    @property
    def computing(self) -> bool:
        """The engine knows nothing of it."""
        return False

    @property
    def tokens_to_compute(self) -> int:
        """None."""
        return 0

    @property
    def computed_tokens(self) -> int:
        """None for this transfer."""
        return 0

    async def _supply(self, plan: TransferPlan, chain: TokenChain | None) -> None:
        cache, geometry = self._context.room.cache, self._context.geometry
        start, stop = self.ticket.start, self.ticket.stop
        if cache is not None and chain is not None:
            tiers = self._context.tiers
            async with brought(tiers, chain, stop, self._quality, self._deadline, resume=True, needed=True):
                self._lease = cache.lease(chain.hashes, stop, self._quality, resume=True)
        if self._lease is None:
            why = f"the first {stop} tokens, and windows and states there, are not all kept here"
            raise JobEnded("prefix_gone", why, stage="transfer")
        self.fate.stage = "transfer"
        blocks = self._lease.blocks[start // geometry.block_tokens :]
        table = compose(geometry, start, stop, blocks, self._lease.snapshot)
        self._send_from(table).exported(len(plan.pieces))

    async def _supplied(self) -> None:
        """It was from the beginning."""

    async def _let_go(self) -> None:
        await self._threads.settle()
        if self._lease is not None:
            self._lease.release()

    def _ready_at(self) -> float:
        return self._announced_at
