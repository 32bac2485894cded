"""The pieces of one transfer on their way out: encoded in threads a little ahead of the wire, sent in plan order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import PageTable
from kvcache.codecs import Buffer, CodecSet
from kvcache.digest import wire_digest
from kvcache.hostpool import HostPool
from kvcache.plan import Piece, TransferPlan
from kvcache.threadwork import ThreadWork
from kvcache.transfer import OutgoingTransfer
from kvcache.transport import Peer


@dataclass(frozen=True, slots=True)
class Encoded:
    """One piece ready to leave. ``payload`` may be pool memory itself."""

    piece: Piece
    codec: str
    payload: Sequence[Buffer]
    wire_bytes: int
    digest: bytes


def encode_batch(
    plan: TransferPlan, table: PageTable, pool: HostPool, codecs: CodecSet, pieces: Sequence[Piece]
) -> list[Encoded]:
    """Encode and digest exported pieces. Runs in a thread. Raises CodecError for what a codec cannot carry."""
    encoded = []
    for piece in pieces:
        views, codec = pool.views(table.extents(piece)), codecs.of(plan, piece)
        payload = codec.encode(views, plan.tensor(piece).dtype, plan.shape(piece))
        size = sum(memoryview(part).nbytes for part in payload)
        encoded.append(Encoded(piece, codec.name, payload, size, wire_digest(codec.exact, views, payload)))
    return encoded


class PieceSender:
    """Sends what is exported, as far as it is. ``exported`` may be called at any time, ``run`` once."""

    def __init__(
        self,
        outgoing: OutgoingTransfer,
        table: PageTable,
        pool: HostPool,
        codecs: CodecSet,
        threads: ThreadWork,
        *,
        batch_bytes: int,
        batches_ahead: int,
    ) -> None:
        self._outgoing = outgoing
        self._table = table
        self._pool = pool
        self._codecs = codecs
        self._threads = threads
        self._batch_bytes = batch_bytes
        self._batches_ahead = batches_ahead
        self._exported = 0
        self._begun = 0
        self._progress = asyncio.Event()

    @property
    def exported_seq(self) -> int:
        """Pieces below it lie in the pool."""
        return self._exported

    def exported(self, next_seq: int) -> None:
        """All pieces below ``next_seq`` lie in the pool. Raises ValueError for a figure the plan does not have."""
        if not self._exported <= next_seq <= len(self._outgoing.plan.pieces):
            raise ValueError(f"engine exported up to {next_seq} after {self._exported}")
        self._exported = next_seq
        self._progress.set()

    async def run(self, peer: Peer) -> None:
        """Send every piece of the plan; when this ends, however it ends, the wire reads no pool memory.

        Raises PeerLost, and CodecError for what a codec cannot carry.
        """
        ahead: deque[asyncio.Future[list[Encoded]]] = deque()
        while self._outgoing.sent < len(self._outgoing.plan.pieces):
            while len(ahead) < self._batches_ahead and self._begun < self._exported:
                ahead.append(self._encode_next())
            if not ahead:
                self._progress.clear()
                await self._progress.wait()
                continue
            for encoded in await ahead.popleft():
                header = self._outgoing.header(encoded.piece, encoded.codec, encoded.wire_bytes, encoded.digest)
                await peer.send_data(header, encoded.payload)

    def _encode_next(self) -> asyncio.Future[list[Encoded]]:
        plan, size, end = self._outgoing.plan, 0, self._begun
        while end < self._exported and size < self._batch_bytes:
            size += plan.pieces[end].nbytes
            end += 1
        pieces, self._begun = plan.pieces[self._begun : end], end
        return self._threads.start(encode_batch, plan, self._table, self._pool, self._codecs, pieces)
