"""How much a codec saves and how fast it is: from pool pages to pool pages, on one thread, in processor time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.codecs import CodecSet
from kvcache.layout import GroupKind
from node.bench.captured import Captured

PASSES = 5


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second count raw bytes; the best of some passes, because machines are shared."""

    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float


def measure(codecs: CodecSet, source: Captured, kinds: Sequence[GroupKind], passes: int = PASSES) -> Speed:
    """Encode and decode every piece of the groups of ``kinds``.

    Raises AssertionError where an exact codec is not.
    """
    pieces = source.pieces(kinds)
    work = [
        (codecs.of(source.plan, piece), source.plan.tensor(piece).dtype, source.plan.shape(piece), source.views(piece))
        for piece in pieces
    ]
    landing = Captured.room(source.plan.layout, (), source.plan.stop, source.plan.chunk_tokens)
    encode_s = decode_s = float("inf")
    try:
        landed = [landing.views(piece) for piece in pieces]
        for _ in range(passes):
            began = time.thread_time()
            encoded = [codec.encode(views, dtype, shape) for codec, dtype, shape, views in work]
            encode_s = min(encode_s, time.thread_time() - began)
            wire = [memoryview(b"".join(parts)) for parts in encoded]
            began = time.thread_time()
            for payload, (codec, dtype, shape, _), out in zip(wire, work, landed, strict=True):
                codec.decode(payload, out, dtype, shape)
            decode_s = min(decode_s, time.thread_time() - began)
        if codecs.exact:
            for (*_, views), out in zip(work, landed, strict=True):
                assert b"".join(views) == b"".join(out), f"{codecs.name} is not exact"
    finally:
        landing.close()
    raw = sum(piece.nbytes for piece in pieces)
    return Speed(raw / sum(payload.nbytes for payload in wire), raw / encode_s, raw / decode_s)
