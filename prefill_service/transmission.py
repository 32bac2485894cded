"""One transfer on its way out, wherever its pieces come from: announce, send, give everything back at the end.

Where the asking side allows it, the first pieces leave right behind the Announce, and so does the Manifest if they are
all; the rest waits for the Grant.

The task that runs a ``Transmission`` owns what it holds of the pool. That goes back when the wire, the encoding threads
and whoever else uses it have all let go of it, however the transfer ended.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from msgspec import structs

from kvcache.blocks import PageTable
from kvcache.chain import TokenChain
from kvcache.codecs import CodecError, CodecSet
from kvcache.control import PrefillJob, SharePrefix
from kvcache.fate import Ending, JobEnded, JobFate
from kvcache.plan import TransferPlan, plan_transfer
from kvcache.quality import Quality
from kvcache.threadwork import ThreadWork
from kvcache.ticket import Ticket
from kvcache.tracing import NO_SPAN, Span
from kvcache.transfer import OutgoingTransfer, TransferViolation
from kvcache.transport import Connection, Expected, Peer, PeerLost, PeerRefused, PeerUnreachable
from kvcache.wire import Abort, Ack, Grant, Manifest, Open
from prefill_service.context import ServiceContext
from prefill_service.sender import PieceSender
from prefill_service.ways import Ways

ABORT_DETAIL_CHARS = 200


class Transmission(ABC):
    """``run`` once; frames and ends come in from outside at any time. ``deadline`` is the loop's time.

    What differs is where the pieces come from, and what that holds.
    """

    def __init__(
        self, context: ServiceContext, order: PrefillJob | SharePrefix, ticket: Ticket, codec: CodecSet, deadline: float
    ) -> None:
        self.job = ticket.transfer.hex()
        self.ticket = ticket
        self.fate = JobFate("queue")
        self.cancel_asked = False
        self.peer: Peer | None = None
        self._context = context
        self._order = order
        self._codec = codec
        self._deadline = deadline
        self._threads = ThreadWork(context.executor)
        self._outgoing: OutgoingTransfer | None = None
        self._sender: PieceSender | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._announced = False
        self._announced_at = 0.0
        self._early_bytes = 0
        self._early: tuple[Connection, ...] = ()
        self._ways = Ways(context.endpoint, order.transports)
        self._granted_at: float | None = None
        self._span = context.tracer.join("prefill", order.traceparent if isinstance(order, PrefillJob) else "")
        self._sending: Span = NO_SPAN
        self._claimed = asyncio.Event()
        self._manifest: Manifest | None = None
        self._manifest_told = False

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether it waits for room."""

    @property
    @abstractmethod
    def computing(self) -> bool:
        """Whether the engine works on it."""

    @property
    @abstractmethod
    def tokens_to_compute(self) -> int:
        """Tokens that the engine has still to do."""

    @property
    @abstractmethod
    def computed_tokens(self) -> int:
        """Tokens that are computed or need no computing."""

    @abstractmethod
    async def _supply(self, plan: TransferPlan, chain: TokenChain | None) -> None:
        """Have the pieces come into the pool, and ``_send_from`` there. Raises JobEnded.

        ``chain`` is that of the tokens below the ticket's stop, None where nothing is cached here.
        """

    @abstractmethod
    async def _supplied(self) -> None:
        """All is sent: return when the source is done, too."""

    @abstractmethod
    async def _let_go(self) -> None:
        """Give back all that is held, once nobody uses it any more. The wire does not."""

    @abstractmethod
    def _ready_at(self) -> float:
        """The loop's time when the last piece lay in the pool."""

    async def run(self) -> Ending | None:
        """Serve the transfer to its end; None where the other side has committed it. Nothing is held afterwards."""
        ending = await self.fate.run(self._work(), self._deadline)
        if ending is not None and self.peer is not None and not ending.told:
            self.peer.send(Abort(self.ticket.transfer, ending.cause, ending.detail[:ABORT_DETAIL_CHARS]))
        for helper in self._helpers:
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)
        await self._let_go()
        for span in (self._sending, self._span):
            span.end("" if ending is None else f"{ending.stage}: {ending.cause}")
        return ending

    def cancel(self) -> None:
        """The gateway no longer wants it."""
        self.cancel_asked = True
        self.fate.end("cancelled", "by the gateway")

    def claim(self, peer: Peer, frame: Open) -> None:
        """An Open with a valid ticket, from the peer whose key the ticket names.

        The first one attaches. Later ones come after a lost connection and say how much has arrived.
        """
        if self.fate.over:
            if self.peer is not peer:
                ending = self.fate.ending
                cause = ending.cause if ending is not None else "ticket_used"
                peer.send(Abort(self.ticket.transfer, cause, "this transfer is over"))
            return
        if self.peer is peer:
            if frame.resume_from:
                self.on_frame(peer, Ack(self.ticket.transfer, frame.resume_from))
            return
        if self.peer is not None:
            self.fate.end("violation", "opened again by another node under the same key", stage="transfer")
            return
        self.peer = peer
        if not self._codec.members.issubset(frame.codecs):
            self.fate.end("codec", f"{self._codec.name} was ordered, offered are {frame.codecs}", stage="transfer")
            return
        self._early_bytes = max(0, min(frame.early_bytes, self._context.limits.early_bytes))
        self._claimed.set()

    def on_frame(self, peer: Peer, frame: Grant | Ack | Abort) -> None:
        """A frame of this transfer. One from anybody but the claimant is ignored."""
        if peer is not self.peer or self.fate.over:
            return
        try:
            match frame:
                case Abort(reason=reason, detail=detail):
                    self.fate.end("aborted", f"{reason}: {detail}", stage="transfer", told=True)
                case Grant():
                    if not self._announced:
                        raise TransferViolation("grant", "came before the Announce")
                    self._on_grant(peer, frame)
                case Ack():
                    if self._outgoing is None:
                        raise TransferViolation("ack", "came before any data")
                    self._outgoing.on_ack(frame)
                    if self._sender is not None:
                        self._sender.acked()
        except TransferViolation as violation:
            self.fate.end("violation", str(violation), stage="transfer")

    def on_broken(self, peer: Peer, connection: Connection) -> None:
        """A connection is gone: say again all that the other side may not have heard over it."""
        if peer is not self.peer or self.fate.over or not self._announced or self._is_committed:
            return
        assert self._outgoing is not None
        assert self._sender is not None
        peer.send(self._outgoing.announce(self._codec.name))
        if self._ways.lost(connection):
            self._sender.go_over(None)
            self._helpers.append(asyncio.create_task(self._take_a_way(peer, self._sender)))
            if self._manifest is not None:
                ways = self._ways
                self._manifest = structs.replace(self._manifest, transport=ways.transport, failed=ways.failed)
        self._sender.broken(connection)
        self._manifest_told = False
        self._tell_manifest(peer)

    def on_lost(self, peer: Peer, cause: str) -> None:
        """A peer is lost; this transfer ends with it if it was the one and nothing is committed."""
        if peer is self.peer and not self._is_committed:
            self.fate.end("peer_lost", cause, stage="transfer", told=True)

    async def _work(self) -> None:
        ticket = self.ticket
        if self._order.dial is not None:
            self._helpers.append(asyncio.create_task(self._dial()))
        layout = self._context.geometry.layout
        plan = await self._threads.start(plan_transfer, layout, ticket.start, ticket.stop, ticket.chunk_tokens)
        chain = None if self._context.room.cache is None else await self._threads.start(self._chain)
        try:
            self._outgoing = OutgoingTransfer(plan, ticket)
        except TransferViolation as violation:
            raise JobEnded("bad_ticket", str(violation)) from violation
        await self._supply(plan, chain)
        await self._claimed.wait()
        assert self.peer is not None
        assert self._sender is not None
        await self._take_a_way(self.peer, self._sender)
        self._announce(self.peer)
        try:
            await self._sender.run(self.peer, self._all_sent)
        except PeerLost as lost:
            raise JobEnded("peer_lost", str(lost), stage="transfer") from lost
        except CodecError as error:
            raise JobEnded("codec", str(error), stage="transfer") from error
        await self._supplied()

    def _send_from(self, table: PageTable) -> PieceSender:
        """What is exported into this table is sent, once the transfer is claimed."""
        assert self._outgoing is not None
        limits = self._context.limits
        self._sender = PieceSender(
            self._outgoing,
            table,
            self._context.pool,
            self._codec,
            self._context.meter,
            self._threads,
            batch_bytes=limits.digest_batch_bytes if self._codec.members == {"raw"} else limits.batch_bytes,
            batches_ahead=limits.batches_ahead,
            wire_bytes_ahead=limits.wire_bytes_ahead,
        )
        return self._sender

    async def _take_a_way(self, peer: Peer, sender: PieceSender) -> None:
        """Find what carries the pieces from now on: the first of the ordered transports that works."""
        sender.go_over(await self._ways.next(peer))

    @property
    def _quality(self) -> Quality:
        """Whoever may have the bytes that are sent may have what they are made from."""
        return Quality.needed_for(self._codec.members) or Quality.EXACT

    def _all_sent(self) -> None:
        """Every piece has gone at least once: close the account. The other side waits for what is still under way."""
        assert self.peer is not None
        assert self._outgoing is not None
        assert self._sender is not None
        granted, ways, backlog = self._granted_at is not None, self._ways, self._sender.backlog
        self._manifest = self._outgoing.manifest(
            self._computed_after_s(), granted, ways.transport, ways.failed, backlog
        )
        self._tell_manifest(self.peer)

    def _announce(self, peer: Peer) -> None:
        """Say that the transfer begins; what may leave before the Grant follows over the same connections."""
        assert self._outgoing is not None
        assert self._sender is not None
        frame = self._outgoing.announce(self._codec.name)
        if not self._announced:
            self._sending = self._span.child("transfer")
        self._announced, self._announced_at = True, asyncio.get_running_loop().time()
        if self._early_bytes and peer.connections:
            self._early = self._ways.lanes or peer.connections
            peer.send_over(frame, self._early)
            self._sender.early(self._early, self._early_bytes)
        else:
            peer.send(frame)

    def _on_grant(self, peer: Peer, grant: Grant) -> None:
        """The first Grant lets everything go; it is repeated after a lost connection."""
        assert self._outgoing is not None
        assert self._sender is not None
        if self._granted_at is not None:
            return
        self._outgoing.check_grant(grant)
        self._granted_at = asyncio.get_running_loop().time()
        if not self._ways.lanes:
            peer.unpin(self.ticket.transfer)
        self._sender.granted(grant.missed)
        self._tell_manifest(peer)

    def _tell_manifest(self, peer: Peer) -> None:
        """Before the Grant it must not arrive before the Announce: it goes where that went, or waits."""
        if self._manifest is None or self._manifest_told:
            return
        early = [connection for connection in self._early if connection.alive]
        if self._granted_at is not None:
            peer.send(self._manifest)
        elif early:
            peer.send_over(self._manifest, early[:1])
        self._manifest_told = self._granted_at is not None or bool(early)

    @property
    def _is_committed(self) -> bool:
        return self._outgoing is not None and self._outgoing.committed

    async def _dial(self) -> None:
        dial = self._order.dial
        assert dial is not None
        try:
            expected = Expected(dial.node_id, dial.incarnation, dial.public_key)
            await self._context.endpoint().peer(expected, dial.address, self._deadline)
        except PeerRefused as error:
            self.fate.end("peer_refused", str(error), stage="transfer")
        except PeerUnreachable as error:
            self.fate.end("peer_unreachable", str(error), stage="transfer")

    def _chain(self) -> TokenChain:
        """The prompt as the cache knows it. Runs in a thread."""
        order, context = self._order, self._context
        tokens, block = order.token_ids[: self.ticket.stop], context.geometry.block_tokens
        return TokenChain.of(tokens, block, fingerprint=context.fingerprint, salt=order.salt, lora=order.lora)

    def _computed_after_s(self) -> float:
        return self._ready_at() - (self._announced_at if self._granted_at is None else self._granted_at)
