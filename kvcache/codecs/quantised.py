"""int8, int4 and fp8: values in steps of their channel or token, each in a byte, and then Huffman coding.

Channel means are taken out first: keys have large ones, and what is left takes half the steps. The entropy stage makes
fixed bit widths needless: int4 is coarse (its step is a fixed part of the standard deviation, which comes to three to
four bits a value) but clips nothing, because an outlier is merely a rarer and longer code. int8 and fp8 set the step by
the furthest value instead, fp8 (e4m3) with finer steps near the mean.

Payload, little-endian: ``"KQ" version:u8 kind:u8 axis:u8 coded:u8 zero:u8[2]``, bf16 means (one per channel where the
piece has 32 rows or more), bf16 steps (by ``axis``: whole, channel or token), and a byte per value: one zstd frame
where ``coded`` is 1, else as they are. Channels are the columns of the piece seen as (first axis, all others); a
token's step serves one vector along the last axis.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from math import prod

import numpy as np

from kvcache.codecs import grid
from kvcache.codecs.arrays import (
    Array,
    cast,
    decode_on_host,
    encode_on_host,
    floats,
    from_host,
    largest,
    namespace,
    rows_heads_columns,
    to_host,
    words_of,
)
from kvcache.codecs.base import Buffer, CodecError
from kvcache.codecs.entropy import HuffmanCoder
from kvcache.codecs.grid import Axis, Grid
from kvcache.layout import DType

QUANTISED_VERSION = 1

_MAGIC = b"KQ"
_HEADER = struct.Struct("<2sBBBB2x")


class Kind(IntEnum):
    """Which steps a value is rounded to. The numbers are on the wire."""

    INT8 = 1
    INT4 = 2
    FP8 = 3


_TOP = {Kind.INT8: 127.0, Kind.INT4: 127.0, Kind.FP8: 448.0}
_PART = {Kind.INT8: 0.0, Kind.INT4: 0.4, Kind.FP8: 0.0}


class Quantised:
    """One inexact codec for every dtype. Values of 2**100 and more, and those that are not finite, are refused.

    ``encode_tensor`` and ``decode_tensor`` do the same where the tensor lives: numpy or torch, host or device, the
    payload's bytes are equal.
    """

    exact = False
    dtypes = tuple(DType)

    def __init__(self, kind: Kind) -> None:
        self.name = kind.name.lower()
        self._kind = kind
        self._coder = HuffmanCoder()

    def encode(self, views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...]) -> Sequence[Buffer]:
        """Header, grid and bytes. Raises ValueError where the views do not hold what dtype and shape say.

        Raises CodecError for values that it cannot carry.
        """
        return encode_on_host(self, views, dtype, shape)

    def decode(
        self,
        payload: Sequence[memoryview] | memoryview,
        out: Sequence[memoryview],
        dtype: DType,
        shape: tuple[int, ...],
    ) -> None:
        """Fill ``out``. Raises CodecError for anything but one whole payload for this dtype and shape."""
        decode_on_host(self, payload, out, dtype, shape)

    def max_wire_bytes(self, raw_bytes: int) -> int:
        """A byte per value (they have two bytes at least), the header and the largest grid."""
        return _HEADER.size + raw_bytes // 2 + 2 * grid.most_counts(raw_bytes // 2)

    def encode_tensor(self, words: Array, dtype: DType, shape: tuple[int, ...]) -> list[Buffer]:
        """``encode`` for the piece's bits as int16 (int32 for fp32), numpy or torch: the bytes are equal."""
        found, symbols = self.quantise(words, dtype, shape)
        plain = to_host(symbols)
        frame = self._coder.compress(plain)
        coded = len(frame) < plain.nbytes
        head = _HEADER.pack(_MAGIC, QUANTISED_VERSION, self._kind, found.axis, coded)
        table = [to_host(part).data.cast("B") for part in (found.means, found.steps) if part.shape[0]]
        return [head, *table, frame if coded else plain.data.cast("B")]

    def decode_tensor(self, payload: memoryview, dtype: DType, shape: tuple[int, ...], like: Array) -> Array:
        """The piece's bits as int16 or int32, flat, in the namespace and on the device of ``like``.

        Raises CodecError as ``decode`` does.
        """
        what = f"{self.name} payload"
        if payload.nbytes < _HEADER.size:
            raise CodecError(f"{what}: {payload.nbytes} bytes")
        magic, version, kind, axis, coded = _HEADER.unpack_from(payload)
        wanted = (_MAGIC, QUANTISED_VERSION, self._kind)
        if (magic, version, kind) != wanted or coded > 1:
            raise CodecError(f"{what}: header {magic!r}, {version}, {kind}, {coded}, expected {wanted} and 0 or 1")
        sizes = rows_heads_columns(shape)
        means, steps = grid.counts(axis, *sizes)
        body = payload[_HEADER.size + 2 * (means + steps) :]
        if payload.nbytes <= _HEADER.size + 2 * (means + steps) or not (coded or body.nbytes == prod(shape)):
            raise CodecError(f"{what}: {payload.nbytes} bytes for {means} means, {steps} steps, {prod(shape)} values")
        plain = self._coder.decompress(body, prod(shape), what) if coded else np.frombuffer(body, np.uint8)
        words = np.frombuffer(payload[_HEADER.size : payload.nbytes - body.nbytes], "<i2")
        found = Grid(Axis(axis), from_host(words[:means], like), from_host(words[means:], like))
        return self.dequantise(found, from_host(plain, like).reshape(sizes), dtype)

    def quantise(self, words: Array, dtype: DType, shape: tuple[int, ...]) -> tuple[Grid, Array]:
        """The arithmetic alone: the grid, and a byte per value, both where ``words`` are. Raises CodecError."""
        values = floats(words.reshape(rows_heads_columns(shape)), dtype)
        magnitude = largest(values, self.name)
        found, scaled = grid.measure(values, magnitude, _TOP[self._kind], _PART[self._kind])
        if self._kind is Kind.FP8:
            return found, _to_e4m3(scaled)
        return found, cast(namespace(scaled).round(scaled), "int8").view(namespace(scaled).uint8)

    def dequantise(self, found: Grid, symbols: Array, dtype: DType) -> Array:
        """The inverse, for ``symbols`` (rows, heads, dim): words, flat. Raises CodecError."""
        xp = namespace(symbols)
        never = (symbols & 0x7F) == 0x7F if self._kind is Kind.FP8 else symbols == 0x80
        if bool(xp.any(never)):
            raise CodecError(f"{self.name} payload: a value that the encoder never makes")
        scaled = _of_e4m3(symbols) if self._kind is Kind.FP8 else cast(symbols.view(xp.int8), "float32")
        return words_of(grid.restore(found, scaled), dtype).reshape(-1)


def _to_e4m3(values: Array) -> Array:
    """fp32 within 448 of 0, rounded to the nearest e4m3 (4 bits of exponent, 3 of mantissa), ties to even.

    In place where it can: fewer arrays alive at once keep malloc from giving memory back and asking for it again.
    """
    xp = namespace(values)
    bits = values.view(xp.int32)
    size = bits & 0x7FFFFFFF
    # Below 2**-6 the spacing is 2**-9, which is that of fp32 around 2**14: the addition rounds.
    fixed = abs(values)
    fixed += 2.0**14
    fixed = fixed.view(xp.int32)
    fixed -= 141 << 23
    normal = size >> 20
    normal &= 1
    normal += 0x7FFFF - (120 << 23)
    normal += size
    normal >>= 20
    code = xp.where(size < (121 << 23), fixed, normal)
    code |= (bits >> 24) & 0x80
    return cast(code, "uint8")


def _of_e4m3(codes: Array) -> Array:
    """e4m3 as fp32: the bits moved into place, and the difference of the exponents' biases multiplied in."""
    wide = cast(codes, "int32")
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return bits.view(namespace(codes).float32) * 2.0**120
