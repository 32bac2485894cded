"""The asking side: takes the gateway's jobs and hands each transfer's frames to the job that fetches it.

Nothing here computes or waits: each job is a ``Generation`` or an ``Intake`` with a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from decode_client.context import ClientContext
from decode_client.fetch import Fetch
from decode_client.generation import Generation
from decode_client.intake import Intake
from decode_client.scratch import Scratch
from kvcache.control import Cancelled, Failed, FromNode, GenerateJob, KvSource, TakePrefix
from kvcache.ticket import Ticket, TicketError, claimed_transfer, verify_any
from kvcache.transport import Peer
from kvcache.wire import Abort, Ack, Announce, Data, Manifest

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class _Gateway:
    """The key that its tickets are signed with, and what its jobs share: their reports go to it alone."""

    key: bytes
    context: ClientContext


class DecodeClient:
    """All generations and intakes of this node. ``now`` is Unix time, for tickets and deadlines.

    Gateways are known by names that the caller chooses: each one's tickets are signed with a key of its own, and what
    becomes of a job is reported to the one that gave it.
    """

    def __init__(self, context: ClientContext, now: Callable[[], float] = time.time) -> None:
        self._context = context
        self._now = now
        self._gateways: dict[str, _Gateway] = {}
        self._orderers: dict[str, str] = {}
        self._scratch = Scratch(context.limits.scratch_bytes)
        self._generations: dict[str, Generation] = {}
        self._intakes: dict[str, Intake] = {}
        self._by_transfer: dict[bytes, Generation | Intake] = {}
        self._committed: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def trust(self, ticket_key: bytes, gateway: str = "", report: Callable[[FromNode], None] | None = None) -> None:
        """Tickets of this gateway are signed with this key from now on, and ``report`` tells it of its jobs."""
        context = self._context if report is None else replace(self._context, report=report)
        self._gateways[gateway] = _Gateway(ticket_key, context)

    def at_hand(self, but: str) -> tuple[int, int]:
        """Generations of all gateways but this one, and what they have still to prefill in place, in tokens."""
        others = [each for job, each in self._generations.items() if self._orderers[job] != but]
        return len(others), sum(each.tokens_to_prefill for each in others)

    @property
    def queued_jobs(self) -> int:
        """Generations whose KV is still on its way."""
        return sum(generation.waiting for generation in self._generations.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that this node has still to prefill in place."""
        return sum(generation.tokens_to_prefill for generation in self._generations.values())

    @property
    def running(self) -> int:
        """Answers that the engine holds."""
        return sum(generation.speaking for generation in self._generations.values())

    @property
    def open_transfers(self) -> int:
        """Jobs with a transfer that is not over."""
        return len(self._by_transfer)

    def accept(self, order: GenerateJob, gateway: str = "") -> None:
        """Take a job. A repeat of one at hand changes nothing; one that cannot be done is reported Failed at once."""
        if order.generation in self._generations:
            return
        context = self._context_of(gateway)
        try:
            generation = self._admit(order, gateway)
        except TicketError as error:
            _refuse(context, order.generation, "bad_ticket", str(error))
            return
        except ValueError as error:
            _refuse(context, order.generation, "bad_order", str(error))
            return
        at_hand = sum(each.untold for each in self._generations.values())
        if at_hand + order.answers > self._context.limits.max_jobs:
            _refuse(context, order.generation, "queue_full", f"{at_hand} answers are at hand")
            return
        self._generations[order.generation] = generation
        self._orderers[order.generation] = gateway
        if generation.ticket is not None:
            self._by_transfer[generation.ticket.transfer] = generation
        self._start(self._answer(generation, context))

    def take(self, order: TakePrefix, gateway: str = "") -> None:
        """Take a prefix in. A repeat of one at hand changes nothing; one that cannot be is reported Failed at once."""
        context = self._context_of(gateway)
        try:
            ticket = self._verify(order.source, len(order.token_ids), gateway)
        except TicketError as error:
            named = claimed_transfer(order.source.ticket) or b""
            _refuse(context, named.hex(), "bad_ticket", str(error))
            return
        job, pages = ticket.transfer.hex(), self._context.geometry.pages_for(ticket.start, ticket.stop)
        if job in self._intakes:
            return
        if ticket.transfer in self._by_transfer:
            _refuse(context, job, "bad_order", "source: another job fetches this transfer")
        elif ticket.stop % self._context.geometry.block_tokens:
            _refuse(context, job, "bad_order", f"token_ids: {ticket.stop} are no whole blocks")
        elif pages > self._context.room.pool.capacity:
            capacity = self._context.room.pool.capacity
            _refuse(context, job, "too_large", f"takes {pages} pages, the pool has {capacity} (--pool-mib)")
        elif len(self._intakes) >= self._context.limits.max_jobs:
            _refuse(context, job, "queue_full", f"{len(self._intakes)} prefixes are being taken in already")
        else:
            deadline = asyncio.get_running_loop().time() + ticket.deadline - self._now()
            intake = Intake(context, order, ticket, self._scratch, deadline)
            self._intakes[job] = self._by_transfer[ticket.transfer] = intake
            self._orderers[job] = gateway
            self._start(self._take_in(intake, context))

    def cancel(self, job: str) -> bool:
        """End a job; Cancelled is reported when it holds nothing. False where no such job is at hand."""
        found = self._generations.get(job) or self._intakes.get(job)
        if found is None:
            return False
        found.cancel()
        return True

    def end_all(self, cause: str, detail: str, gateway: str | None = None) -> None:
        """End every job at hand, or every one of this gateway."""
        jobs: list[Generation | Intake] = [*self._generations.values(), *self._intakes.values()]
        for job in jobs:
            if gateway in (None, self._orderers[job.job]):
                job.fate.end(cause, detail)

    def leave(self, gateway: str, cause: str, detail: str) -> None:
        """A gateway is gone: its jobs end, and its tickets are worth nothing until it is trusted anew."""
        self.end_all(cause, detail, gateway)
        self._gateways.pop(gateway, None)

    async def settled(self) -> None:
        """Return when no job is at hand."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """End everything and wait until nothing is held. Idempotent."""
        self.end_all("shutdown", "the decode node is stopping")
        await self.settled()

    def on_frame(self, peer: Peer, frame: Announce | Manifest | Abort) -> None:
        """A frame from a prefill node."""
        fetch = self._fetch(frame.transfer)
        if fetch is not None:
            fetch.on_frame(peer, frame)
        elif isinstance(frame, Announce | Manifest) and frame.transfer not in self._by_transfer:
            # What ended this transfer may have been lost on its way: the other side must not wait for it.
            pieces = self._committed.get((frame.transfer, peer.identity.public_key))
            if pieces is None:
                peer.send(Abort(frame.transfer, "unknown_transfer", "it is over, or was never asked for"))
            else:
                peer.send(Ack(frame.transfer, pieces, committed=True))

    def payload_target(self, peer: Peer, data: Data) -> Sequence[memoryview] | None:
        """Where a payload goes; None to throw it away."""
        fetch = self._fetch(data.transfer)
        return fetch.payload_target(peer, data) if fetch is not None else None

    def on_data(self, peer: Peer, data: Data) -> None:
        """A payload has arrived in the target that it was given."""
        fetch = self._fetch(data.transfer)
        if fetch is not None:
            fetch.on_data(peer, data)

    def on_broken(self, peer: Peer, unfinished: Data | None) -> None:
        """A connection is gone and the peer is not."""
        for job in list(self._by_transfer.values()):
            if job.fetch is not None:
                job.fetch.on_broken(peer, unfinished)

    def on_lost(self, peer: Peer, cause: str) -> None:
        """A peer is lost."""
        for job in list(self._by_transfer.values()):
            if job.fetch is not None:
                job.fetch.on_lost(peer, cause)

    def _fetch(self, transfer: bytes) -> Fetch | None:
        job = self._by_transfer.get(transfer)
        return job.fetch if job is not None else None

    def _context_of(self, gateway: str) -> ClientContext:
        known = self._gateways.get(gateway)
        return self._context if known is None else known.context

    def _admit(self, order: GenerateJob, gateway: str) -> Generation:
        """The job, checked. Raises TicketError, ValueError naming what is wrong with the order."""
        if not order.token_ids:
            raise ValueError("token_ids: empty, at least one token is needed")
        if not 1 <= order.answers <= self._context.limits.max_answers:
            most = self._context.limits.max_answers
            raise ValueError(f"answers: {order.answers}, this node gives 1 to {most} to one prompt")
        now, loop_now = self._now(), asyncio.get_running_loop().time()
        deadline = fetch_deadline = loop_now + order.deadline - now
        ticket = None
        if order.source is not None:
            ticket = self._verify(order.source, len(order.token_ids) - 1, gateway)
            if ticket.transfer in self._by_transfer:
                raise ValueError("source: another job fetches this transfer")
            fetch_deadline = min(deadline, loop_now + ticket.deadline - now)
            pages = self._context.geometry.pages_for(0, ticket.stop)
            if pages > self._context.room.pool.capacity:
                capacity = self._context.room.pool.capacity
                raise ValueError(f"source: takes {pages} pages, the pool has {capacity} (--pool-mib)")
        context = self._context_of(gateway)
        return Generation(context, order, ticket, self._scratch, deadline, fetch_deadline)

    def _verify(self, source: KvSource, stop: int, gateway: str) -> Ticket:
        """The ticket, if it is the gateway's and for this node and job. Raises TicketError."""
        known = self._gateways.get(gateway)
        keys = () if known is None else (known.key,)
        ticket = verify_any(source.ticket, keys, self._now(), self._context.limits.clock_skew_s)
        for field, wanted in (
            ("prefill_node", source.node_id),
            ("prefill_incarnation", source.incarnation),
            ("decode_key", self._context.public_key),
            ("fingerprint", self._context.fingerprint),
            ("chunk_tokens", self._context.chunk_tokens),
            ("stop", stop),
        ):
            found = getattr(ticket, field)
            if found != wanted:
                shown = (v.hex() if isinstance(v, bytes) else str(v) for v in (found, wanted))
                raise TicketError(field, "{}, this job needs {}".format(*shown))
        block = self._context.geometry.block_tokens
        if ticket.start % block:
            raise TicketError("start", f"{ticket.start}, this node holds blocks of {block} tokens")
        return ticket

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, generation: Generation, context: ClientContext) -> None:
        ending = await generation.run()
        del self._generations[generation.job]
        del self._orderers[generation.job]
        if generation.ticket is not None:
            del self._by_transfer[generation.ticket.transfer]
            self._remember(generation)
        request = generation.job.rpartition(".")[0]  # how gateways name generations
        if generation.cancel_asked:
            context.report(Cancelled(generation.job, generation.prefilled_tokens))
        elif ending is None:
            log.info("generation=%s request=%s done", generation.job, request)
        else:
            log.info(
                "generation=%s request=%s failed stage=%s cause=%s", generation.job, request, ending.stage, ending.cause
            )
            context.report(Failed(generation.job, ending.stage, ending.cause, ending.detail))

    async def _take_in(self, intake: Intake, context: ClientContext) -> None:
        ending = await intake.run()
        del self._intakes[intake.job]
        del self._orderers[intake.job]
        del self._by_transfer[intake.ticket.transfer]
        self._remember(intake)
        if intake.cancel_asked:
            context.report(Cancelled(intake.job))
        elif ending is not None:
            log.info("intake=%s failed stage=%s cause=%s", intake.job, ending.stage, ending.cause)
            context.report(Failed(intake.job, ending.stage, ending.cause, ending.detail))

    def _remember(self, job: Generation | Intake) -> None:
        """Keep what was committed for a while: the other side may not have heard so."""
        fetch = job.fetch
        if fetch is not None and fetch.peer is not None and fetch.committed_pieces:
            self._committed[fetch.transfer, fetch.peer.identity.public_key] = fetch.committed_pieces
            if len(self._committed) > MAX_REMEMBERED:
                self._committed.popitem(last=False)


def _refuse(context: ClientContext, job: str, cause: str, detail: str) -> None:
    log.warning("job refused job=%s cause=%s detail=%r", job, cause, detail)
    context.report(Failed(job, "queue", cause, detail))
