"""Pieces between the wire and their pages: where each payload goes, and whether what arrived is what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import PageTable
from kvcache.codecs import CodecError, CodecSet
from kvcache.digest import wire_digest
from kvcache.hostpool import HostPool
from kvcache.plan import Piece, TransferPlan


@dataclass(frozen=True, slots=True)
class Landed:
    """A piece whose payload has arrived: in its pages already (``payload`` None), or encoded in scratch."""

    piece: Piece
    payload: memoryview | None


def check_batch(
    plan: TransferPlan, table: PageTable, pool: HostPool, codecs: CodecSet, batch: Sequence[Landed]
) -> list[tuple[int, bytes]]:
    """Bring pieces into their pages and digest what arrived, as the wire has it: (seq, digest) each. Runs in a thread.

    Raises CodecError for a payload that does not decode.
    """
    digests = []
    for landed in batch:
        views, codec = pool.views(table.extents(landed.piece)), codecs.of(plan, landed.piece)
        if landed.payload is not None:
            try:
                codec.decode(landed.payload, views, plan.tensor(landed.piece).dtype, plan.shape(landed.piece))
            except CodecError as error:
                raise CodecError(f"piece {landed.piece.seq}: {error}") from error
        arrived = views if landed.payload is None else [landed.payload]
        digests.append((landed.piece.seq, wire_digest(codec.exact, views, arrived)))
    return digests
