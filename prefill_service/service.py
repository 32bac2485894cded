"""The serving side of transfers: brings the gateway's orders and the asking nodes' Opens together.

Nothing here computes or waits: each job is a ``Transmission`` with a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcache import codecs
from kvcache.codecs import CodecError, CodecSet, UnknownCodec
from kvcache.control import Cancelled, Failed, FromNode, PrefillJob, SharePrefix
from kvcache.ticket import Ticket, TicketError, claimed_transfer, verify_any
from kvcache.transport import Connection, Peer
from kvcache.wire import Abort, Ack, Grant, Open
from prefill_service.context import ServiceContext
from prefill_service.export import Export
from prefill_service.share import Share
from prefill_service.transmission import Transmission
from prefill_service.used import UsedTransfers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EarlyOpen:
    """An Open that came before its job, and the timer that refuses it."""

    peer: Peer
    frame: Open
    timer: asyncio.TimerHandle


@dataclass(frozen=True, slots=True)
class _Gateway:
    """The key that its tickets are signed with, and what its jobs share: their reports go to it alone."""

    key: bytes
    context: ServiceContext


class OrderRefused(Exception):
    """A job that this node will not take."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


class PrefillService:
    """All transfers that this node serves. ``now`` is Unix time, for tickets.

    Gateways are known by names that the caller chooses: each one's tickets are signed with a key of its own, and what
    becomes of a job is reported to the one that gave it.
    """

    def __init__(self, context: ServiceContext, now: Callable[[], float] = time.time) -> None:
        self._context = context
        self._now = now
        self._gateways: dict[str, _Gateway] = {}
        self._used = UsedTransfers()
        self._exports: dict[bytes, Transmission] = {}
        self._orderers: dict[bytes, str] = {}
        self.refused_tickets = 0
        """Tickets that were forged, for another node or key, or used before, since the start."""
        self._early: dict[bytes, EarlyOpen] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def trust(self, ticket_key: bytes, gateway: str = "", report: Callable[[FromNode], None] | None = None) -> None:
        """Tickets of this gateway are signed with this key from now on, and ``report`` tells it of its jobs."""
        context = self._context if report is None else replace(self._context, report=report)
        self._gateways[gateway] = _Gateway(ticket_key, context)

    def at_hand(self, but: str) -> tuple[int, int]:
        """Jobs of all gateways but this one, and what is still to be computed of them, in tokens."""
        others = [export for transfer, export in self._exports.items() if self._orderers[transfer] != but]
        return len(others), sum(export.tokens_to_compute for export in others)

    @property
    def queued_jobs(self) -> int:
        """Jobs that wait for room in the pool."""
        return sum(export.waiting for export in self._exports.values())

    @property
    def queued_tokens(self) -> int:
        """Tokens of all jobs that are still to be computed."""
        return sum(export.tokens_to_compute for export in self._exports.values())

    @property
    def running(self) -> int:
        """Jobs that the engine holds."""
        return sum(export.computing for export in self._exports.values())

    @property
    def tickets(self) -> int:
        """Tickets that must not be used again yet, and those whose jobs are still to come."""
        self._used.forget(self._now())
        return len(self._used) + len(self._early)

    @property
    def open_transfers(self) -> int:
        """Jobs that hold or wait for anything."""
        return len(self._exports)

    def accept(self, order: PrefillJob | SharePrefix, gateway: str = "") -> None:
        """Take a job. A repeat of one at hand changes nothing; one that cannot be done is reported Failed at once."""
        known = self._gateways.get(gateway)
        context = self._context if known is None else known.context
        try:
            ticket = self._verify(order.ticket, () if known is None else (known.key,))
        except TicketError as error:
            named = claimed_transfer(order.ticket) or b""
            self.refused_tickets += 1
            _refuse(context, named.hex(), "bad_ticket", str(error))
            return
        if ticket.transfer in self._exports:
            return
        try:
            codec = self._check(order, ticket)
        except OrderRefused as refused:
            _refuse(context, ticket.transfer.hex(), refused.cause, refused.detail)
            return
        now = self._now()
        self._used.add(ticket.transfer, ticket.deadline + self._context.limits.clock_skew_s, now)
        deadline = asyncio.get_running_loop().time() + ticket.deadline - now
        export: Transmission
        if isinstance(order, SharePrefix):
            export = Share(context, order, ticket, codec, deadline)
        else:
            export = Export(context, order, ticket, codec, deadline)
        self._exports[ticket.transfer] = export
        self._orderers[ticket.transfer] = gateway
        task = asyncio.create_task(self._serve(export, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        early = self._early.pop(ticket.transfer, None)
        if early is not None:
            early.timer.cancel()
            self._claim(early.peer, early.frame)

    def cancel(self, job: str) -> bool:
        """End a job; Cancelled is reported when it holds nothing. False where no such job is at hand."""
        export = next((e for e in self._exports.values() if e.job == job), None)
        if export is None:
            return False
        export.cancel()
        return True

    def end_all(self, cause: str, detail: str, gateway: str | None = None) -> None:
        """End every job at hand, or every one of this gateway."""
        for transfer, export in self._exports.items():
            if gateway in (None, self._orderers[transfer]):
                export.fate.end(cause, detail)

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
        for early in self._early.values():
            early.timer.cancel()
        self._early.clear()
        self.end_all("shutdown", "the prefill node is stopping")
        await self.settled()

    def on_frame(self, peer: Peer, frame: Open | Grant | Ack | Abort) -> None:
        """A frame from a decode node."""
        if isinstance(frame, Open):
            self._claim(peer, frame)
            return
        export = self._exports.get(frame.transfer)
        if export is not None:
            export.on_frame(peer, frame)
        elif isinstance(frame, Abort):
            self._forget_early(peer, frame.transfer)

    def on_broken(self, peer: Peer, connection: Connection) -> None:
        """A connection is gone and the peer is not."""
        for export in list(self._exports.values()):
            export.on_broken(peer, connection)

    def on_lost(self, peer: Peer, cause: str) -> None:
        """A peer is lost."""
        for export in list(self._exports.values()):
            export.on_lost(peer, cause)
        for transfer in list(self._early):
            self._forget_early(peer, transfer)

    def _verify(self, data: bytes, keys: Sequence[bytes]) -> Ticket:
        """The ticket, if one of these keys signed it and it is for this node. Raises TicketError."""
        ticket = verify_any(data, keys, self._now(), self._context.limits.clock_skew_s)
        for field, mine in (
            ("prefill_node", self._context.node_id),
            ("prefill_incarnation", self._context.incarnation),
            ("fingerprint", self._context.fingerprint),
            ("chunk_tokens", self._context.chunk_tokens),
        ):
            if getattr(ticket, field) != mine:
                raise TicketError(field, f"{getattr(ticket, field)}, this node has {mine}")
        return ticket

    def _check(self, order: PrefillJob | SharePrefix, ticket: Ticket) -> CodecSet:
        """The ordered codecs. Raises OrderRefused for a job that this node cannot do now."""
        if ticket.transfer in self._used:
            raise OrderRefused("ticket_used", "this transfer was served before")
        if len(order.token_ids) < ticket.stop:
            raise OrderRefused("bad_order", f"token_ids: {len(order.token_ids)}, the ticket covers {ticket.stop}")
        if isinstance(order, SharePrefix):
            self._check_share(ticket)
        else:
            self._check_prefill(ticket)
        try:
            ordered = codecs.set_by_name(order.codec, self._context.transforms)
            ordered.check(self._context.geometry.layout)
        except (UnknownCodec, CodecError) as error:
            raise OrderRefused("codec", str(error)) from error
        return ordered

    def _check_prefill(self, ticket: Ticket) -> None:
        pages = self._context.geometry.pages_for(ticket.start, ticket.stop)
        capacity = self._context.room.pool.capacity
        if pages > capacity:
            raise OrderRefused("too_large", f"takes {pages} pages, the pool has {capacity} (--pool-mib)")
        if self.queued_jobs >= self._context.limits.max_queue:
            raise OrderRefused("queue_full", f"{self.queued_jobs} jobs wait already")
        if self._context.engine() is None:
            raise OrderRefused("engine_lost", "the engine is being restarted")

    def _check_share(self, ticket: Ticket) -> None:
        block = self._context.geometry.block_tokens
        if ticket.start % block or ticket.stop % block:
            raise OrderRefused(
                "bad_order", f"ticket: [{ticket.start}, {ticket.stop}) is not whole blocks of {block} tokens"
            )
        shares = sum(isinstance(export, Share) for export in self._exports.values())
        if shares >= self._context.limits.max_queue:
            raise OrderRefused("queue_full", f"{shares} prefixes are being shared already")

    async def _serve(self, export: Transmission, context: ServiceContext) -> None:
        ending = await export.run()
        del self._exports[export.ticket.transfer]
        del self._orderers[export.ticket.transfer]
        if export.cancel_asked:
            context.report(Cancelled(export.job, export.computed_tokens))
        elif ending is None:
            log.info("transfer=%s request=%s done tokens=%d", export.job, export.ticket.request_id, export.ticket.stop)
        else:
            request = export.ticket.request_id
            log.info("transfer=%s request=%s failed stage=%s cause=%s", export.job, request, ending.stage, ending.cause)
            context.report(Failed(export.job, ending.stage, ending.cause, ending.detail))

    def _claim(self, peer: Peer, frame: Open) -> None:
        """Attach a peer to the job that its ticket names, wait a little for that job, or say why not."""
        try:
            ticket = self._verify(frame.ticket, self._keys(frame.ticket))
            if ticket.decode_key != peer.identity.public_key:
                raise TicketError("decode_key", "belongs to another node")
        except TicketError as error:
            named = claimed_transfer(frame.ticket)
            self._refused(peer, str(error))
            if named is not None:
                peer.send(Abort(named, "bad_ticket", str(error)))
            return
        export = self._exports.get(ticket.transfer)
        if export is not None:
            export.claim(peer, frame)
        elif ticket.transfer in self._used:
            self._refused(peer, "ticket_used: this transfer is over")
            peer.send(Abort(ticket.transfer, "ticket_used", "this transfer is over"))
        elif ticket.transfer not in self._early:
            self._wait_for_job(peer, frame, ticket.transfer)

    def _refused(self, peer: Peer, reason: str) -> None:
        self.refused_tickets += 1
        log.warning("open refused peer=%s reason=%r", peer.identity.node_id, reason)

    def _keys(self, ticket: bytes) -> list[bytes]:
        """Who may have signed this ticket: whoever gave its job, or any gateway while that is not here."""
        orderer = self._gateways.get(self._orderers.get(claimed_transfer(ticket) or b"", ""))
        return [each.key for each in ([orderer] if orderer is not None else self._gateways.values())]

    def _wait_for_job(self, peer: Peer, frame: Open, transfer: bytes) -> None:
        limits = self._context.limits
        if len(self._early) >= limits.max_early_opens:
            peer.send(Abort(transfer, "busy", "too many transfers wait for their jobs"))
            return
        timer = asyncio.get_running_loop().call_later(limits.open_wait_s, self._expire_early, transfer)
        self._early[transfer] = EarlyOpen(peer, frame, timer)

    def _expire_early(self, transfer: bytes) -> None:
        early = self._early.pop(transfer)
        detail = f"no job came within {self._context.limits.open_wait_s} s"
        early.peer.send(Abort(transfer, "unknown_job", detail))

    def _forget_early(self, peer: Peer, transfer: bytes) -> None:
        early = self._early.get(transfer)
        if early is not None and early.peer is peer:
            early.timer.cancel()
            del self._early[transfer]


def _refuse(context: ServiceContext, job: str, cause: str, detail: str) -> None:
    log.warning("job refused transfer=%s cause=%s detail=%r", job, cause, detail)
    context.report(Failed(job, "queue", cause, detail))
