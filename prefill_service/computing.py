"""The engine's part of one export: what it is told, what it says, and what of its work stays in the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engines.keeping import JobKeeper, checkpoints
from engines.protocol import (
    Checkpoint,
    Exported,
    JobCancelled,
    JobEvent,
    JobFailed,
    Offered,
    PrefillCommand,
    PrefillFinished,
    Stored,
)
from engines.running import EngineRun
from kvcache.control import PrefillDone, PrefillJob, PrefillStarted
from kvcache.fate import JobEnded, JobFate
from kvcache.plan import TransferPlan
from kvcache.ticket import Ticket
from kvcache.tracing import Span
from prefill_service.booking import Booking
from prefill_service.context import ServiceContext


class Computation:
    """Runs from its making to ``stop``; ``exported`` is told how many pieces of the plan lie in the pool.

    ``keeper`` is None where nothing is cached. ``last_at`` is the loop's time when the last piece was exported.
    """

    def __init__(
        self,
        context: ServiceContext,
        order: PrefillJob,
        ticket: Ticket,
        plan: TransferPlan,
        booking: Booking,
        keeper: JobKeeper | None,
        fate: JobFate,
        span: Span,
        exported: Callable[[int], None],
    ) -> None:
        """Starts the engine. Raises JobEnded where there is none."""
        engine = context.engine()
        if engine is None:
            raise JobEnded("engine_lost", "the engine is being restarted")
        self.computed_tokens = booking.cached_tokens
        self.last_at: float | None = None
        self._context = context
        self._ticket = ticket
        self._plan = plan
        self._booking = booking
        self._keeper = keeper
        self._fate = fate
        self._tell = exported
        self._exported = 0
        wanted: tuple[Checkpoint, ...] = ()
        if keeper is not None:
            policy, geometry = context.checkpoints, context.geometry
            wanted = checkpoints(geometry, policy, booking.cached_tokens, ticket.start, ticket.stop)
        command = PrefillCommand(
            job=ticket.transfer.hex(),
            token_ids=order.token_ids[: ticket.stop],
            start=ticket.start,
            stop=ticket.stop,
            pages=booking.table.pages,
            priority=order.priority,
            cached=booking.cached_tokens,
            cached_pages=booking.cached_pages,
            checkpoints=wanted,
            salt=order.salt,
        )
        self._run = EngineRun(engine, command, self._on_event)
        fate.stage = "prefill"
        cached, stop = booking.cached_tokens, ticket.stop
        self._span = span.child("compute", {"prfaas.cached_tokens": cached, "prfaas.tokens": stop - cached})
        context.report(PrefillStarted(ticket.transfer, booking.cached_tokens))

    @property
    def ended(self) -> bool:
        """Whether the engine is done with the job."""
        return self._run.ended

    async def wait(self) -> None:
        """Return when the engine is done with the job. Raises EngineLost, and what its events gave rise to."""
        await self._run.wait()

    async def stop(self) -> None:
        """End it if it still runs. Afterwards the engine touches nothing of it."""
        last = await self._run.stop(self._context.limits.engine_patience_s)
        if isinstance(last, JobCancelled):
            self.computed_tokens = last.prefilled_tokens
        self._span.end("stopped")

    def keep(self, done: bool) -> None:
        """Keep the blocks that are exported as a whole; once the transfer is ``done`` with them, what else can be."""
        if self._keeper is not None:
            self._keeper.keep_table(self._booking.table, self._whole_tokens(), done)

    def _on_event(self, event: JobEvent) -> None:
        match event:
            case Exported(next_seq=next_seq):
                self._tell(next_seq)
                self._exported = next_seq
                self.computed_tokens = max(self.computed_tokens, self._whole_tokens())
                if next_seq == len(self._plan.pieces):
                    self.last_at = asyncio.get_running_loop().time()
            case PrefillFinished(compute_s=compute_s):
                self._finished(compute_s)
            case Offered() if self._keeper is not None:
                self.keep(done=False)
                self._keeper.offered(event, self._run)
            case Stored() if self._keeper is not None:
                self._keeper.stored(event)
            case JobFailed(cause=cause, detail=detail):
                self._fate.end(cause, detail, stage="prefill")
            case JobCancelled(prefilled_tokens=prefilled):
                self.computed_tokens = prefilled
                self._fate.end("engine_cancelled", "the engine gave the job up", stage="prefill")

    def _finished(self, compute_s: float) -> None:
        """Say so, if anybody still wants to know. Raises ValueError where the engine left something out."""
        if self._exported != len(self._plan.pieces):
            raise ValueError(f"engine finished after {self._exported} pieces of the plan")
        self._span.end()
        if not self._fate.over:
            self._fate.stage = "transfer"
            cached = self._booking.cached_tokens
            self._context.report(PrefillDone(self._ticket.transfer, compute_s, self._ticket.stop - cached, cached))

    def _whole_tokens(self) -> int:
        """Tokens of which every layer's pieces are exported."""
        pieces = self._plan.pieces
        if self._exported == len(pieces):
            return self._ticket.stop
        first = self._ticket.start // self._ticket.chunk_tokens
        return max(self._ticket.start, (first + pieces[self._exported].chunk) * self._ticket.chunk_tokens)
