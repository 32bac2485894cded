"""One prefill being served: wait for room, compute, send what is computed, keep what is worth keeping."""

from __future__ import annotations

import asyncio
import contextlib

from engines.keeping import JobKeeper
from engines.protocol import EngineLost
from kvcache.chain import TokenChain
from kvcache.codecs import CodecSet
from kvcache.control import PrefillJob
from kvcache.fate import JobEnded
from kvcache.kept import Provenance
from kvcache.plan import TransferPlan
from kvcache.room import RoomCrowded, RoomTimeout
from kvcache.ticket import Ticket
from kvcache.tiers.hierarchy import brought
from kvcache.tracing import part
from prefill_service.booking import Booking
from prefill_service.computing import Computation
from prefill_service.context import ServiceContext
from prefill_service.transmission import Transmission


class Export(Transmission):
    """A transfer whose pieces the engine computes; its pages go back when the engine has let go of them, too."""

    def __init__(
        self, context: ServiceContext, order: PrefillJob, ticket: Ticket, codec: CodecSet, deadline: float
    ) -> None:
        super().__init__(context, order, ticket, codec, deadline)
        self._prefill = order
        self._owner = f"export:{self.job}"
        self._computation: Computation | None = None
        self._booking: Booking | None = None
        self._keeper: JobKeeper | None = None

    @property
    def waiting(self) -> bool:
        """Whether it has not begun to compute."""
        return self._computation is None

    @property
    def computing(self) -> bool:
        """Whether the engine works on it."""
        return self._computation is not None and not self._computation.ended

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that the engine has still to do."""
        return self.ticket.stop - self.computed_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens that are computed or need no computing."""
        return 0 if self._computation is None else self._computation.computed_tokens

    async def _supply(self, plan: TransferPlan, chain: TokenChain | None) -> None:
        with part(self._span, "queue"):
            booking = await self._book(chain)
        sender = self._send_from(booking.table)
        context, order = self._context, self._prefill
        self._computation = Computation(
            context, order, self.ticket, plan, booking, self._keeper, self.fate, self._span, sender.exported
        )
        self._helpers.append(asyncio.create_task(self._watch_engine(self._computation)))

    async def _supplied(self) -> None:
        assert self._computation is not None
        with contextlib.suppress(EngineLost):
            await self._computation.wait()

    async def _let_go(self) -> None:
        if self._computation is not None:
            await self._computation.stop()
        await self._threads.settle()
        if self._computation is not None:
            self._computation.keep(done=True)
        if self._keeper is not None:
            self._keeper.close()
        if self._booking is not None:
            self._booking.release()

    def _ready_at(self) -> float:
        assert self._computation is not None
        last_at = self._computation.last_at
        return asyncio.get_running_loop().time() if last_at is None else last_at

    async def _book(self, chain: TokenChain | None) -> Booking:
        """Wait for room, with what tiers have of the prompt on its way meanwhile."""
        self._booking = booking = Booking(self._context, self._owner, self.ticket, self._quality, chain)
        tiers, below = self._context.tiers, self.ticket.stop - 1
        try:
            async with brought(tiers, chain, below, self._quality, self._deadline, resume=True):
                await booking.book(self._deadline, self._prefill.priority)
        except RoomCrowded as error:
            raise JobEnded("queue_full", str(error)) from error
        except RoomTimeout as error:
            raise JobEnded("deadline", str(error)) from error
        if chain is not None and booking.lease is not None:
            provenance = Provenance(booking.lease.quality, origin=self._context.node_id)
            room, geometry = self._context.room, self._context.geometry
            self._keeper = JobKeeper(room, geometry, self._owner, chain, booking.lease, provenance, exports=True)
        return booking

    async def _watch_engine(self, computation: Computation) -> None:
        """An engine that is lost or breaks the protocol ends the transfer, whatever the transfer waits for."""
        try:
            await computation.wait()
        except Exception as error:
            if not self._is_committed:
                self.fate.end("engine_lost", str(error), stage="prefill")
