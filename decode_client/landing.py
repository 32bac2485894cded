"""Pieces between the wire and their pages: where each payload goes, and whether what arrived is what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import PageTable
from kvcache.codecs import Codec, CodecError
from kvcache.digest import piece_digest
from kvcache.hostpool import HostPool
from kvcache.plan import Piece, TransferPlan


@dataclass(frozen=True, slots=True)
class Landed:
    """A piece whose payload has arrived: in its pages already (``payload`` None), or encoded in scratch."""

    piece: Piece
    payload: memoryview | None


def check_batch(
    plan: TransferPlan, table: PageTable, pool: HostPool, codec: Codec, batch: Sequence[Landed]
) -> list[tuple[int, bytes]]:
    """Bring pieces into their pages and digest what then lies there: (seq, digest) each. Runs in a thread.

    An exact codec's digest is that of the raw bytes in the pages, another's that of the encoded bytes. Raises
    CodecError for a payload that does not decode.
    """
    digests = []
    for landed in batch:
        views = pool.views(table.extents(landed.piece))
        if landed.payload is not None:
            try:
                codec.decode(landed.payload, views, plan.tensor(landed.piece).dtype, plan.shape(landed.piece))
            except CodecError as error:
                raise CodecError(f"piece {landed.piece.seq}: {error}") from error
        if landed.payload is None or codec.exact:
            digests.append((landed.piece.seq, piece_digest(views)))
        else:
            digests.append((landed.piece.seq, piece_digest([landed.payload])))
    return digests
