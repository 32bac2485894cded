"""One transfer being fetched: find the peer, open, grant room, take pieces in, verify, commit.

The first pieces may come before the Grant, behind the Announce. If there is room at once they land like all others;
if not they are thrown away, and the Grant says which.

``Fetch`` does not own the pages it fills: its generation does, and asks with ``settle`` whether they may be freed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from decode_client.context import ClientContext
from decode_client.landing import Landed, check_batch
from decode_client.scratch import Scratch
from kvcache.blocks import PageTable
from kvcache.codecs import CodecError, CodecSet, offered
from kvcache.control import KvSource, TransferDone
from kvcache.fate import Ending, JobEnded, JobFate
from kvcache.lease import Lease
from kvcache.plan import TransferPlan
from kvcache.room import RoomCrowded, RoomTimeout
from kvcache.threadwork import ThreadWork
from kvcache.ticket import Ticket
from kvcache.transfer import IncomingTransfer, TransferViolation
from kvcache.transport import Expected, Peer, PeerRefused, PeerUnreachable
from kvcache.wire import Abort, Ack, Announce, Data, Grant, Manifest, Open

ABORT_DETAIL_CHARS = 200
_PLAIN = frozenset({"raw"})


@dataclass(frozen=True, slots=True)
class Fetched:
    """Committed KV: the pages hold what was exported, bit for bit where the transfer's codecs are exact."""

    pages: tuple[int, ...]
    report: TransferDone
    codec: CodecSet


class Fetch:
    """``run`` once, inside the generation's work; frames come in from outside and may end the generation."""

    def __init__(
        self,
        context: ClientContext,
        source: KvSource,
        ticket: Ticket,
        plan: TransferPlan,
        fate: JobFate,
        scratch: Scratch,
        held: Lease | None = None,
        spare: bool = False,
        rank: int = 0,
    ) -> None:
        """``held`` is a soft lease of all blocks below the plan's start; it is firm once there is room for the rest.
        Of those that wait for room the least ``rank`` is first.

        ``spare``: it can be done without, so it takes only what is to spare when the Announce comes. Raises
        TransferViolation where the plan exceeds the ticket.
        """
        self.transfer = ticket.transfer
        self.peer: Peer | None = None
        self._context = context
        self._source = source
        self._fate = fate
        self._scratch = scratch
        self._held = held
        self._spare = spare
        self._rank = rank
        self._offered = offered(source.quality, context.transforms)
        self._incoming = IncomingTransfer(plan, ticket, self._offered, context.transforms)
        self._threads = ThreadWork(context.executor)
        self._table: PageTable | None = None
        self._landing: dict[int, Landed] = {}
        self._acked_at = 0.0
        self._landed: deque[Landed] = deque()
        self._arrival = asyncio.Event()
        self._announced = asyncio.Event()
        self._manifest: asyncio.Future[Manifest] = asyncio.get_running_loop().create_future()
        self._acked = 0
        self._owner = ""
        self._open = Open(source.ticket, self._offered)
        self._early_left = 0
        self._missed: set[int] = set()
        self._announced_at = 0.0
        self._granted_at = 0.0
        self._grant: Grant | None = None
        self._pages: tuple[int, ...] = ()
        self._committed = False

    async def run(self, owner: str, deadline: float) -> Fetched:
        """Fetch into pages reserved for ``owner``; they are the caller's from then on, also where this raises.

        Raises JobEnded.
        """
        loop, plan = asyncio.get_running_loop(), self._incoming.plan
        peer = self.peer = await self._find_peer(deadline)
        self._owner = owner
        if self._context.room.free_for(self._page_count):
            self._early_left = self._context.limits.early_bytes
        self._open = Open(self._source.ticket, self._offered, early_bytes=self._early_left)
        peer.send(self._open)
        await self._announced.wait()
        if self._grant is None:
            if self._spare:
                raise JobEnded("no_room", f"{self._page_count} pages are not to spare (--pool-mib)")
            self._grant_room(peer, await self._reserve(deadline))
        way_s = peer.way_s
        try:
            await self._verify_all(peer)
            digest = self._incoming.finish(await self._manifest)
        except TransferViolation as violation:
            raise JobEnded("corrupt" if violation.field == "digest" else "violation", str(violation)) from violation
        except CodecError as error:
            raise JobEnded("corrupt", str(error)) from error
        self._committed = True
        peer.send(Ack(self.transfer, self._incoming.next_seq, committed=True))
        now = loop.time()
        manifest = self._manifest.result()
        reached = self._granted_at + way_s if manifest.granted else self._announced_at - way_s
        exposed = max(0.0, now - reached - manifest.computed_after_s)
        # What follows the Announce needs no Grant: it comes as if granted a round trip before.
        early = self._open.early_bytes and not self._missed
        began = self._announced_at - 2 * way_s if early else self._granted_at
        codec = self._incoming.codec
        assert codec is not None
        done = TransferDone(
            self.transfer,
            plan.nbytes,
            self._incoming.wire_bytes,
            codec.name,
            now - began,
            exposed,
            digest,
            transport=manifest.transport,
            backlog_bytes=manifest.backlog,
            failed_transports=manifest.failed,
        )
        return Fetched(self._pages, done, codec)

    @property
    def committed_pieces(self) -> int:
        """How many pieces the committed transfer has; 0 where it is not committed."""
        return self._incoming.next_seq if self._committed else 0

    def abort(self, ending: Ending) -> None:
        """Tell the other side, unless it knows."""
        if self.peer is not None and not ending.told and not self._committed:
            self.peer.send(Abort(self.transfer, ending.cause, ending.detail[:ABORT_DETAIL_CHARS]))

    async def settle(self) -> None:
        """Return when nothing writes to the pages any more."""
        if self.peer is not None:
            self.peer.drop_payload(self.transfer)
            self._landing.clear()
        await self._threads.settle()
        if self.peer is not None:
            self._drop(self.peer, self._landed)
        self._landed.clear()

    def on_frame(self, peer: Peer, frame: Announce | Manifest | Abort) -> None:
        """A frame of this transfer. One from anybody but its peer is ignored."""
        if peer is not self.peer or self._fate.over or self._committed:
            return
        match frame:
            case Abort(reason=reason, detail=detail):
                self._fate.end("aborted", f"{reason}: {detail}", stage="transfer", told=True)
            case Announce():
                try:
                    self._incoming.check_announce(frame)
                except TransferViolation as violation:
                    self._fate.end("violation", str(violation), stage="transfer")
                else:
                    self._on_announce(peer)
            case Manifest():
                if not self._announced.is_set():
                    self._fate.end("violation", "manifest: came before the Announce", stage="transfer")
                elif not self._manifest.done():
                    self._manifest.set_result(frame)

    def payload_target(self, peer: Peer, data: Data) -> Sequence[memoryview] | None:
        """Where this payload goes; None to throw it away."""
        if peer is not self.peer or self._fate.over or self._committed:
            return None
        try:
            if self._table is None:
                self._miss(data)
                return None
            piece = self._incoming.check_data(data)
        except TransferViolation as violation:
            self._fate.end("violation", str(violation), stage="transfer")
            return None
        if piece is None:
            return None
        if piece.seq in self._landing:
            peer.drop_payload(self.transfer, piece.seq)
        views = self._context.pool.views(self._table.extents(piece))
        if data.codec == "raw":
            self._landing[piece.seq] = Landed(piece, views, None)
            return views
        scratch = memoryview(bytearray(data.wire_bytes))
        self._landing[piece.seq] = Landed(piece, views, scratch)
        return [scratch]

    def on_data(self, peer: Peer, data: Data) -> None:
        """A payload has arrived in the target that it was given."""
        if peer is not self.peer or data.seq not in self._landing:
            return
        landed = self._landing.pop(data.seq)
        self._incoming.arrived(data.seq)
        self._landed.append(landed)
        if landed.payload is not None:
            self._scratch.hold(peer, landed.payload.nbytes)
        self._arrival.set()

    def on_broken(self, peer: Peer, unfinished: Data | None) -> None:
        """A connection is gone: say again all that the other side may not have heard over it."""
        if peer is not self.peer:
            return
        if unfinished is not None and unfinished.transfer == self.transfer:
            self._landing.pop(unfinished.seq, None)
        if self._committed:
            peer.send(Ack(self.transfer, self._incoming.next_seq, committed=True))
        elif not self._fate.over:
            peer.send(structs.replace(self._open, resume_from=self._incoming.next_seq))
            if self._grant is not None:
                peer.send(self._grant)

    def on_lost(self, peer: Peer, cause: str) -> None:
        """The peer is lost; the transfer ends with it unless it is committed."""
        if peer is not self.peer:
            return
        self._landing.clear()
        if not self._committed:
            self._fate.end("peer_lost", cause, stage="transfer", told=True)

    async def _find_peer(self, deadline: float) -> Peer:
        source = self._source
        try:
            expected = Expected(source.node_id, source.incarnation, source.public_key)
            peer = await self._context.endpoint().peer(expected, source.dial, deadline)
        except PeerRefused as error:
            raise JobEnded("peer_refused", str(error)) from error
        except PeerUnreachable as error:
            raise JobEnded("peer_unreachable", str(error)) from error
        if not peer.alive:
            raise JobEnded("peer_lost", "it was lost as soon as it was there")
        return peer

    def _on_announce(self, peer: Peer) -> None:
        """Grant room if it is there: pieces may follow at once. If not, ``run`` waits for it."""
        if self._announced.is_set():
            return
        self._announced.set()
        self._announced_at = asyncio.get_running_loop().time()
        pages = self._context.room.try_acquire_by(self._owner, self._page_count, self._take, self._rank)
        if pages is not None:
            self._grant_room(peer, pages)

    def _grant_room(self, peer: Peer, pages: tuple[int, ...]) -> None:
        plan = self._incoming.plan
        self._pages, self._table = pages, self._context.geometry.table(plan.start, plan.stop, pages)
        self._grant = Grant(self.transfer, tuple(sorted(self._missed)))
        self._granted_at = asyncio.get_running_loop().time()
        peer.send(self._grant)

    def _miss(self, data: Data) -> None:
        """A piece came that there is no room for yet. Raises TransferViolation for more than was allowed."""
        piece = self._incoming.check_header(data)
        if piece.seq in self._missed:
            return  # it had begun over a connection that is lost
        if piece.nbytes > self._early_left:
            raise TransferViolation("data", "came before the Grant")
        self._early_left -= piece.nbytes
        self._missed.add(piece.seq)

    @property
    def _page_count(self) -> int:
        plan = self._incoming.plan
        return self._context.geometry.pages_for(plan.start, plan.stop)

    def _take(self) -> tuple[int, ...] | None:
        """Take the pages, and hold firmly what lies before them from then on.

        A job that waits holds it softly: it gives way to one whose turn it is, and fails.
        """
        if self._spare:
            return self._context.room.take_spare(self._owner, self._page_count)
        if self._held is None:
            return self._context.room.take(self._owner, self._page_count)
        if not self._held.firm():
            return None  # its end is decided
        pages = self._context.room.take(self._owner, self._page_count)
        if pages is None:
            self._held.soften()
        return pages

    async def _reserve(self, deadline: float) -> tuple[int, ...]:
        try:
            room = self._context.room
            return await room.acquire_by(self._owner, self._page_count, self._take, deadline, self._rank)
        except RoomCrowded as error:
            raise JobEnded("queue_full", str(error)) from error
        except RoomTimeout as error:
            raise JobEnded("deadline", str(error)) from error

    async def _verify_all(self, peer: Peer) -> None:
        plan, codec, limits = self._incoming.plan, self._incoming.codec, self._context.limits
        assert codec is not None
        assert self._table is not None
        while self._incoming.next_seq < len(plan.pieces):
            if not self._landed:
                await self._next_arrival()
            batch, size = [], 0
            most = limits.digest_batch_bytes if codec.members == _PLAIN else limits.batch_bytes
            while self._landed and size < most:
                batch.append(self._landed.popleft())
                size += batch[-1].piece.nbytes
            try:
                digests = await self._threads.start(check_batch, plan, codec, self._context.meter, batch)
            finally:
                self._drop(peer, batch)
            for seq, digest in digests:
                self._incoming.verified(seq, digest)
            self._acknowledge(peer)

    def _acknowledge(self, peer: Peer) -> None:
        """Every so many pieces, and whenever nothing waits: then the other side is not ahead, and should know."""
        limits, now = self._context.limits, asyncio.get_running_loop().time()
        unsaid = self._incoming.next_seq - self._acked
        if unsaid >= limits.ack_every or (unsaid and not self._landed and now - self._acked_at >= limits.ack_pause_s):
            self._acked, self._acked_at = self._incoming.next_seq, now
            peer.send(Ack(self.transfer, self._acked))

    async def _next_arrival(self) -> None:
        """Wait for a piece. Raises JobEnded where the Manifest says that all were sent and one does not come."""
        while not self._landed:
            self._arrival.clear()
            try:
                async with asyncio.timeout(self._context.limits.straggler_s):
                    await self._arrival.wait()
            except TimeoutError:
                if self._manifest.done():
                    missing = f"piece {self._incoming.next_seq} of {len(self._incoming.plan.pieces)} is missing"
                    raise JobEnded("violation", missing, stage="transfer") from None

    def _drop(self, peer: Peer, batch: Sequence[Landed]) -> None:
        for landed in batch:
            if landed.payload is not None:
                self._scratch.drop(peer, landed.payload.nbytes)
