"""Pieces between the wire and their pages: where each payload goes, and whether what arrived is what was sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.codecs import CodecError, CodecSet
from kvcache.codecs.meter import CodecMeter
from kvcache.digest import wire_digest
from kvcache.plan import Piece, TransferPlan


@dataclass(frozen=True, slots=True)
class Landed:
    """A piece on its way into ``views``, its place in the pages: straight (``payload`` None), or encoded by scratch."""

    piece: Piece
    views: Sequence[memoryview]
    payload: memoryview | None


def check_batch(
    plan: TransferPlan, codecs: CodecSet, meter: CodecMeter, batch: Sequence[Landed]
) -> list[tuple[int, bytes]]:
    """Bring pieces into their pages and digest what arrived, as the wire has it: (seq, digest) each. Runs in a thread.

    Raises CodecError for a payload that does not decode.
    """
    digests, began = [], time.thread_time()
    for landed in batch:
        views, codec = landed.views, codecs.of(plan, landed.piece)
        if landed.payload is not None:
            try:
                codec.decode(landed.payload, views, plan.tensor(landed.piece).dtype, plan.shape(landed.piece))
            except CodecError as error:
                raise CodecError(f"piece {landed.piece.seq}: {error}") from error
        arrived = views if landed.payload is None else [landed.payload]
        digests.append((landed.piece.seq, wire_digest(codec.exact, views, arrived)))
    meter.decoded(codecs.name, sum(landed.piece.nbytes for landed in batch), time.thread_time() - began)
    return digests
