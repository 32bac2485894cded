"""What the codecs do on this machine before any transfer has shown it: a few pieces of made-up KV, there and back.

It takes milliseconds. Real transfers soon outweigh it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod

import numpy as np

from kvcache.codecs import CodecSet
from kvcache.codecs.arrays import words_of
from kvcache.codecs.meter import CodecMeter
from kvcache.control import CodecWork
from kvcache.digest import wire_digest
from kvcache.layout import DType, KVLayout, TensorSpec
from kvcache.plan import Piece, TransferPlan, plan_transfer

PASSES = 2
"""The first one warms up: what it takes is not counted."""


def measure(layout: KVLayout, chunk_tokens: int, sets: Sequence[CodecSet]) -> tuple[CodecWork, ...]:
    """Encode and decode one piece of each kind of tensor with each set of codecs, on this thread."""
    plan = plan_transfer(layout, 0, chunk_tokens, chunk_tokens)
    pieces: dict[TensorSpec, Piece] = {}
    for piece in plan.pieces:
        pieces.setdefault(plan.tensor(piece), piece)
    raw = {piece.seq: _made_up(plan.tensor(piece).dtype, plan.shape(piece)) for piece in pieces.values()}
    meter = CodecMeter(each.name for each in sets)
    for each in sets:
        for counted in range(PASSES):
            for piece in pieces.values():
                _there_and_back(each, plan, piece, raw[piece.seq], meter if counted else CodecMeter())
    return meter.totals()


def _there_and_back(each: CodecSet, plan: TransferPlan, piece: Piece, raw: memoryview, meter: CodecMeter) -> None:
    codec, dtype, shape = each.of(plan, piece), plan.tensor(piece).dtype, plan.shape(piece)
    began = time.thread_time()
    encoded = codec.encode([raw], dtype, shape)
    wire_digest(codec.exact, [raw], encoded)
    encode_s = time.thread_time() - began
    payload = memoryview(b"".join(encoded))
    out = memoryview(bytearray(raw.nbytes))
    began = time.thread_time()
    codec.decode(payload, [out], dtype, shape)
    wire_digest(codec.exact, [out], [payload])
    meter.encoded(each.name, raw.nbytes, payload.nbytes, encode_s)
    meter.decoded(each.name, raw.nbytes, time.thread_time() - began)


def _made_up(dtype: DType, shape: tuple[int, ...]) -> memoryview:
    """Normal values whose mean and scale differ by channel, as those of keys do; always the same."""
    source = np.random.default_rng(0)
    channels = prod(shape[1:])
    scale = np.exp(source.normal(0.0, 0.5, channels))
    values = (source.normal(0.0, 1.0, (shape[0], channels)) + source.normal(0.0, 1.0, channels)) * scale
    return np.ascontiguousarray(words_of(values.astype(np.float32), dtype)).data.cast("B")
