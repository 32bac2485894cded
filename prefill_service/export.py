"""One transfer being served: wait for room, compute, announce, send, give everything back at the end.

Where the asking side allows it, the first pieces leave right behind the Announce, and so does the Manifest if they are
all; the rest waits for the Grant.

The task that runs an ``Export`` owns its pages. They go back when the wire, the engine and the encoding threads have
all let go of them, however the transfer ended.
"""

from __future__ import annotations

import asyncio
import contextlib

from engines.keeping import JobKeeper
from engines.protocol import EngineLost
from kvcache.chain import TokenChain
from kvcache.codecs import CodecError, CodecSet
from kvcache.control import PrefillJob
from kvcache.fate import Ending, JobEnded, JobFate
from kvcache.kept import Provenance
from kvcache.plan import plan_transfer
from kvcache.quality import Quality
from kvcache.room import RoomCrowded, RoomTimeout
from kvcache.threadwork import ThreadWork
from kvcache.ticket import Ticket
from kvcache.transfer import OutgoingTransfer, TransferViolation
from kvcache.transport import Connection, Expected, Peer, PeerLost, PeerRefused, PeerUnreachable
from kvcache.wire import Abort, Ack, Grant, Manifest, Open
from prefill_service.booking import Booking
from prefill_service.computing import Computation
from prefill_service.context import ServiceContext
from prefill_service.sender import PieceSender

ABORT_DETAIL_CHARS = 200


class Export:
    """``run`` once; frames and ends come in from outside at any time. ``deadline`` is the loop's time."""

    def __init__(
        self, context: ServiceContext, order: PrefillJob, ticket: Ticket, codec: CodecSet, deadline: float
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
        self._owner = f"export:{self.job}"
        self._threads = ThreadWork(context.executor)
        self._outgoing: OutgoingTransfer | None = None
        self._sender: PieceSender | None = None
        self._computation: Computation | None = None
        self._booking: Booking | None = None
        self._keeper: JobKeeper | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._announced = False
        self._announced_at = 0.0
        self._early_bytes = 0
        self._early: tuple[Connection, ...] = ()
        self._granted_at: float | None = None
        self._claimed = asyncio.Event()
        self._manifest: Manifest | None = None
        self._manifest_told = False

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

    async def run(self) -> Ending | None:
        """Serve the transfer to its end; None where the other side has committed it. Nothing is held afterwards."""
        ending = await self.fate.run(self._work(), self._deadline)
        if ending is not None and self.peer is not None and not ending.told:
            self.peer.send(Abort(self.ticket.transfer, ending.cause, ending.detail[:ABORT_DETAIL_CHARS]))
        for helper in self._helpers:
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)
        if self._computation is not None:
            await self._computation.stop()
        await self._threads.settle()
        if self._computation is not None:
            self._computation.keep(done=True)
        if self._keeper is not None:
            self._keeper.close()
        if self._booking is not None:
            self._booking.release()
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
        self._sender.broken(connection)
        self._manifest_told = False
        self._tell_manifest(peer)

    def on_lost(self, peer: Peer, cause: str) -> None:
        """A peer is lost; this transfer ends with it if it was the one and nothing is committed."""
        if peer is self.peer and not self._is_committed:
            self.fate.end("peer_lost", cause, stage="transfer", told=True)

    async def _work(self) -> None:
        ticket, limits = self.ticket, self._context.limits
        if self._order.dial is not None:
            self._helpers.append(asyncio.create_task(self._dial()))
        layout = self._context.geometry.layout
        plan = await self._threads.start(plan_transfer, layout, ticket.start, ticket.stop, ticket.chunk_tokens)
        chain = None if self._context.room.cache is None else await self._threads.start(self._chain)
        try:
            self._outgoing = OutgoingTransfer(plan, ticket)
        except TransferViolation as violation:
            raise JobEnded("bad_ticket", str(violation)) from violation
        booking = await self._book(chain)
        self._sender = PieceSender(
            self._outgoing,
            booking.table,
            self._context.pool,
            self._codec,
            self._context.meter,
            self._threads,
            batch_bytes=limits.digest_batch_bytes if self._codec.members == {"raw"} else limits.batch_bytes,
            batches_ahead=limits.batches_ahead,
            wire_bytes_ahead=limits.wire_bytes_ahead,
        )
        context, order = self._context, self._order
        self._computation = Computation(
            context, order, ticket, plan, booking, self._keeper, self.fate, self._sender.exported
        )
        self._helpers.append(asyncio.create_task(self._watch_engine(self._computation)))
        await self._claimed.wait()
        assert self.peer is not None
        self._announce(self.peer)
        try:
            await self._sender.run(self.peer, self._all_sent)
        except PeerLost as lost:
            raise JobEnded("peer_lost", str(lost), stage="transfer") from lost
        except CodecError as error:
            raise JobEnded("codec", str(error), stage="transfer") from error
        with contextlib.suppress(EngineLost):
            await self._computation.wait()

    def _all_sent(self) -> None:
        """Every piece has gone at least once: close the account. The other side waits for what is still under way."""
        assert self.peer is not None
        assert self._outgoing is not None
        granted = self._granted_at is not None
        self._manifest = self._outgoing.manifest(self._computed_after_s(), granted)
        self._tell_manifest(self.peer)

    def _announce(self, peer: Peer) -> None:
        """Say that the transfer begins; what may leave before the Grant follows over the same connections."""
        assert self._outgoing is not None
        assert self._sender is not None
        frame = self._outgoing.announce(self._codec.name)
        self._announced, self._announced_at = True, asyncio.get_running_loop().time()
        if self._early_bytes and peer.connections:
            self._early = peer.connections
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

    async def _book(self, chain: TokenChain | None) -> Booking:
        """Wait for room. Whoever may have the bytes that are sent may have what they are computed from."""
        quality = Quality.needed_for(self._codec.members) or Quality.EXACT
        self._booking = booking = Booking(self._context, self._owner, self.ticket, quality, chain)
        try:
            await booking.book(self._deadline)
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

    def _computed_after_s(self) -> float:
        assert self._computation is not None
        last_at = self._computation.last_at
        computed_at = asyncio.get_running_loop().time() if last_at is None else last_at
        return computed_at - (self._announced_at if self._granted_at is None else self._granted_at)
