"""fp16: the half of an fp32 state that survives one hop best, and lossless coding of what it becomes.

A power of two brings the largest value under fp16's ceiling first: nothing overflows, and small states keep their bits.

Payload, little-endian: ``"KH" version:u8 zero:u8 exponent:i16 zero:u8[2]``, then a ``lossless`` payload of the fp16
values, which are the piece's times 2**exponent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import frexp, prod

import numpy as np

from kvcache.codecs.arrays import (
    Array,
    cast,
    decode_on_host,
    encode_on_host,
    floats,
    from_host,
    largest,
    to_host,
    words_of,
)
from kvcache.codecs.base import Buffer, CodecError
from kvcache.codecs.lossless import Lossless
from kvcache.layout import DType

HALF_VERSION = 1

_MAGIC = b"KH"
_HEADER = struct.Struct("<2sBxh2x")
# The largest value is brought below 2**15; the factor itself must be a normal fp32, both ways.
_CEILING = 15
_MOST = 120


class Half:
    """Inexact, for fp32 alone: other dtypes are refused, because they have no more to give."""

    name = "fp16"
    exact = False
    dtypes = (DType.FLOAT32,)

    def __init__(self) -> None:
        self._lossless = Lossless()

    def encode(self, views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...]) -> Sequence[Buffer]:
        """Header and payload. Raises ValueError where the views do not hold what dtype and shape say.

        Raises CodecError for another dtype than fp32 and for values that it cannot carry.
        """
        _check(dtype)
        return encode_on_host(self, views, dtype, shape)

    def decode(
        self,
        payload: Sequence[memoryview] | memoryview,
        out: Sequence[memoryview],
        dtype: DType,
        shape: tuple[int, ...],
    ) -> None:
        """Fill ``out``. Raises CodecError for another dtype than fp32 and for anything but one whole payload."""
        _check(dtype)
        decode_on_host(self, payload, out, dtype, shape)

    def max_wire_bytes(self, raw_bytes: int) -> int:
        """Half of the raw bytes, and two headers."""
        return _HEADER.size + self._lossless.max_wire_bytes(raw_bytes // 2)

    def encode_tensor(self, words: Array, dtype: DType, shape: tuple[int, ...]) -> list[Buffer]:
        """``encode`` for the piece's bits as int32, numpy or torch: the bytes are equal."""
        _check(dtype)
        values = floats(words, dtype)
        magnitude = largest(values, self.name)
        exponent = min(_MOST, _CEILING - frexp(magnitude)[1]) if magnitude else 0
        halves = to_host(cast(values * 2.0**exponent, "float16")).data.cast("B")
        head = _HEADER.pack(_MAGIC, HALF_VERSION, exponent)
        return [head, *self._lossless.encode([halves], DType.FLOAT16, shape)]

    def decode_tensor(self, payload: memoryview, dtype: DType, shape: tuple[int, ...], like: Array) -> Array:
        """The piece's bits as int32, flat, in the namespace and on the device of ``like``. Raises CodecError."""
        _check(dtype)
        if payload.nbytes < _HEADER.size:
            raise CodecError(f"fp16 payload: {payload.nbytes} bytes")
        magic, version, exponent = _HEADER.unpack_from(payload)
        if (magic, version) != (_MAGIC, HALF_VERSION) or abs(exponent) > _MOST:
            raise CodecError(f"fp16 payload: {magic!r} version {version} exponent {exponent}")
        halves = np.empty(prod(shape), "<i2")
        self._lossless.decode(payload[_HEADER.size :], [halves.data.cast("B")], DType.FLOAT16, shape)
        values = floats(from_host(halves, like), DType.FLOAT16)
        if not bool(abs(values).max() < float("inf")):
            raise CodecError("fp16 payload: values that are not finite")
        return words_of(values * 2.0**-exponent, dtype)


def _check(dtype: DType) -> None:
    if dtype not in Half.dtypes:
        raise CodecError(f"fp16 carries float32 alone, not {dtype}; choose another codec for this tensor")
