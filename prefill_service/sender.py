"""The pieces of one transfer on their way out: encoded in threads a little ahead of the wire, sent in plan order.

The first may leave before the Grant, over connections that the Announce went over, so that none arrives before it. What
is lost with one of them goes again once the Grant is there.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.blocks import PageTable
from kvcache.codecs import Buffer, CodecSet
from kvcache.codecs.meter import CodecMeter
from kvcache.digest import wire_digest
from kvcache.hostpool import HostPool
from kvcache.plan import Piece, TransferPlan
from kvcache.threadwork import ThreadWork
from kvcache.transfer import OutgoingTransfer
from kvcache.transport import Connection, Outgoing, Peer


@dataclass(frozen=True, slots=True)
class Encoded:
    """One piece ready to leave. ``payload`` may be pool memory itself."""

    piece: Piece
    codec: str
    payload: Sequence[Buffer]
    wire_bytes: int
    digest: bytes


def encode_batch(
    plan: TransferPlan,
    table: PageTable,
    pool: HostPool,
    codecs: CodecSet,
    meter: CodecMeter,
    pieces: Sequence[Piece],
) -> list[Encoded]:
    """Encode and digest exported pieces. Runs in a thread. Raises CodecError for what a codec cannot carry."""
    encoded, began = [], time.thread_time()
    for piece in pieces:
        views, codec = pool.views(table.extents(piece)), codecs.of(plan, piece)
        payload = codec.encode(views, plan.tensor(piece).dtype, plan.shape(piece))
        size = sum(memoryview(part).nbytes for part in payload)
        encoded.append(Encoded(piece, codec.name, payload, size, wire_digest(codec.exact, views, payload)))
    raw_bytes, wire_bytes = sum(piece.nbytes for piece in pieces), sum(each.wire_bytes for each in encoded)
    meter.encoded(codecs.name, raw_bytes, wire_bytes, time.thread_time() - began)
    return encoded


class PieceSender:
    """Sends what is exported, as far as it is, and again what a lost connection may have taken with it.

    ``exported``, ``granted``, ``acked`` and ``broken`` may be called at any time, ``run`` once.
    """

    def __init__(
        self,
        outgoing: OutgoingTransfer,
        table: PageTable,
        pool: HostPool,
        codecs: CodecSet,
        meter: CodecMeter,
        threads: ThreadWork,
        *,
        batch_bytes: int,
        batches_ahead: int,
        wire_bytes_ahead: int,
    ) -> None:
        self._outgoing = outgoing
        self._table = table
        self._pool = pool
        self._codecs = codecs
        self._meter = meter
        self._threads = threads
        self._batch_bytes = batch_bytes
        self._batches_ahead = batches_ahead
        self._wire_bytes_ahead = wire_bytes_ahead
        self._exported = 0
        self._begun = 0
        self._left = outgoing.plan.nbytes
        self._again: deque[int] = deque()
        self._leaving: deque[tuple[int, Outgoing]] = deque()
        self._leaving_bytes = 0
        self._carriers: dict[int, Connection] = {}
        self._forgotten = 0
        self._granted = False
        self._early: tuple[Connection, ...] = ()
        self._early_left = 0
        self._over: tuple[Connection, ...] | None = None
        self.backlog = 0
        """Raw bytes of the pieces that were not acknowledged when the last one came into the pool."""
        self._progress = asyncio.Event()

    def exported(self, next_seq: int) -> None:
        """All pieces below ``next_seq`` lie in the pool. Raises ValueError for a figure the plan does not have."""
        if not self._exported <= next_seq <= len(self._outgoing.plan.pieces):
            raise ValueError(f"engine exported up to {next_seq} after {self._exported}")
        self._exported = next_seq
        pieces = self._outgoing.plan.pieces
        if next_seq == len(pieces):
            self.backlog = sum(piece.nbytes for piece in pieces[self._outgoing.acked_seq :])
        self._progress.set()

    def go_over(self, lanes: tuple[Connection, ...] | None) -> None:
        """Pieces go over these lanes alone from now on; None for the peer's connections, whichever has room."""
        self._over = lanes

    def early(self, over: tuple[Connection, ...], nbytes: int) -> None:
        """The Announce has left over these connections: up to ``nbytes`` raw bytes may follow there at once."""
        self._early, self._early_left = over, nbytes

    def granted(self, missed: Sequence[int]) -> None:
        """All may leave; ``missed`` has left already and must go again."""
        self._granted = True
        self._send_again(missed)

    def acked(self) -> None:
        """The other side has more of it, or all."""
        for seq in range(self._forgotten, self._outgoing.acked_seq):
            self._carriers.pop(seq, None)
        self._forgotten = self._outgoing.acked_seq
        if self._outgoing.committed:
            self._progress.set()

    def broken(self, connection: Connection) -> None:
        """What this connection carried and was not acknowledged must go once more."""
        self._send_again(sorted(seq for seq, carrier in self._carriers.items() if carrier is connection))

    def _send_again(self, pieces: Sequence[int]) -> None:
        known = set(self._again)
        self._again.extend(seq for seq in pieces if seq not in known)
        self._progress.set()

    async def run(self, peer: Peer, all_sent: Callable[[], None]) -> None:
        """Send every piece of the plan, call ``all_sent`` once, and return when the other side has committed.

        When this ends, however it ends, the wire reads no pool memory. Raises PeerLost, and CodecError for what a codec
        cannot carry.
        """
        ahead: deque[asyncio.Future[list[Encoded]]] = deque()
        told = False
        try:
            while not self._outgoing.committed:
                while len(ahead) < self._batches_ahead and (pieces := self._next_pieces()):
                    ahead.append(self._encode(pieces))
                if ahead:
                    for encoded in await ahead.popleft():
                        await self._send(peer, encoded)
                elif self._leaving:
                    await self._leave(peer)
                elif not told and self._outgoing.sent == len(self._outgoing.plan.pieces):
                    told = True
                    all_sent()
                else:
                    self._progress.clear()
                    await self._progress.wait()
        finally:
            for _, frame in self._leaving:
                peer.drop(frame)
            peer.forget(self._outgoing.transfer)

    def _next_pieces(self) -> Sequence[Piece]:
        """The next batch: what must go again, else what was exported since."""
        plan, size = self._outgoing.plan, 0
        if not self._granted:
            return self._early_pieces()
        if self._again:
            again = []
            while self._again and size < self._batch_bytes:
                seq = self._again.popleft()
                if seq >= self._outgoing.acked_seq:
                    again.append(plan.pieces[seq])
                    size += again[-1].nbytes
            return again
        end = self._begun
        while end < self._exported and size < self._batch_bytes:
            size += plan.pieces[end].nbytes
            end += 1
        pieces, self._begun = plan.pieces[self._begun : end], end
        return pieces

    def _early_pieces(self) -> Sequence[Piece]:
        """What may leave before the Grant."""
        if not any(connection.alive for connection in self._early):
            return ()
        pieces, end, size = self._outgoing.plan.pieces, self._begun, 0
        while end < self._exported and size < self._batch_bytes and pieces[end].nbytes <= self._early_left:
            size += pieces[end].nbytes
            self._early_left -= pieces[end].nbytes
            end += 1
        early, self._begun = pieces[self._begun : end], end
        return early

    def _encode(self, pieces: Sequence[Piece]) -> asyncio.Future[list[Encoded]]:
        return self._threads.start(
            encode_batch, self._outgoing.plan, self._table, self._pool, self._codecs, self._meter, pieces
        )

    async def _send(self, peer: Peer, encoded: Encoded) -> None:
        """Put a frame on the wire, waiting while too many wait there already."""
        piece = encoded.piece
        first = piece.seq == self._outgoing.sent
        header = self._outgoing.header(piece, encoded.codec, encoded.wire_bytes, encoded.digest)
        only = self._over if self._granted else self._early
        frame = peer.submit(header, encoded.payload, self._left, only)
        if first:
            self._left -= piece.nbytes
        self._leaving.append((piece.seq, frame))
        self._leaving_bytes += frame.nbytes
        while self._leaving and (self._leaving[0][1].carrier or self._leaving_bytes > self._wire_bytes_ahead):
            await self._leave(peer)

    async def _leave(self, peer: Peer) -> None:
        """Wait for the oldest frame to be carried, and remember by which connection."""
        seq, frame = self._leaving[0]
        carrier = await peer.carried(frame)
        self._leaving.popleft()
        self._leaving_bytes -= frame.nbytes
        if not carrier.alive:
            self._again.append(seq)
        elif seq >= self._outgoing.acked_seq:
            self._carriers[seq] = carrier
