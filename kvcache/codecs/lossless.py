"""Bit-exact compression: exponents are entropy-coded, signs and mantissas travel as they are.

The mantissas of a cache are noise, its exponents are not: they cluster around a scale that differs by channel. So each
element is rotated left by one bit, which puts the exponent (of fp16, with the first mantissa bits) into its top byte;
the top bytes, less their channel's mean, go through zstd's Huffman coder, the rest is stored.

Payload, little-endian: ``"KL" version:u8 mode:u8 centre:u8 zero:u8[3] coded:u32``, then ``coded`` bytes of one zstd
frame and the remaining bytes of all elements, plane by plane: low bytes of 16-bit elements, or low 16 bits and then
bits 16-23 of 32-bit ones. Mode STORED is the raw bytes instead. In mode CENTRED the frame starts with one byte per
channel (column of the piece seen as (shape[0], the rest)): its mean less ``centre``, modulo 256.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.base import Buffer, CodecError, check_size, gather, scatter
from kvcache.codecs.entropy import HuffmanCoder
from kvcache.layout import DType

LOSSLESS_VERSION = 1

_MAGIC = b"KL"
_HEADER = struct.Struct("<2sBBB3xI")
_MAX_RAW_BYTES = 1 << 32
# Below this many rows the channel means cost more than they save.
_CENTRE_FROM_ROWS = 32

_Bytes = NDArray[np.uint8]
_Words = NDArray[Any]


class _Mode(IntEnum):
    STORED = 0
    PLAIN = 1
    CENTRED = 2


class Lossless:
    """Exponent split and Huffman coding for bf16, fp16 and fp32, exact for every bit pattern."""

    name = "lossless"
    exact = True
    dtypes = tuple(DType)

    def __init__(self) -> None:
        self._coder = HuffmanCoder()

    def encode(self, views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...]) -> Sequence[Buffer]:
        """Header, coded exponents and the stored planes; or header and the views themselves where nothing is won.

        Raises ValueError where the views do not hold what dtype and shape say, or more than 4 GiB.
        """
        total = check_size(views, dtype, shape, "views")
        if total >= _MAX_RAW_BYTES:
            raise ValueError(f"views: {total} bytes in one piece, lossless takes less than {_MAX_RAW_BYTES}")
        words = _words(gather(views), dtype)
        rotated = (words << 1) | (words >> (words.itemsize * 8 - 1))
        top = (rotated >> (words.itemsize * 8 - 8)).astype(np.uint8)
        mode, centre = _Mode.PLAIN, 0
        if shape and shape[0] >= _CENTRE_FROM_ROWS:
            mode = _Mode.CENTRED
            top, centre = _centred(top.reshape(shape[0], -1))
        coded = self._coder.compress(top)
        if len(coded) >= words.size:
            return [_HEADER.pack(_MAGIC, LOSSLESS_VERSION, _Mode.STORED, 0, 0), *views]
        return [
            _HEADER.pack(_MAGIC, LOSSLESS_VERSION, mode, centre, len(coded)),
            coded,
            *(plane.data.cast("B") for plane in _low_planes(rotated)),
        ]

    def decode(
        self,
        payload: Sequence[memoryview] | memoryview,
        out: Sequence[memoryview],
        dtype: DType,
        shape: tuple[int, ...],
    ) -> None:
        """Fill ``out``, bit for bit. Raises CodecError for anything but one whole payload for this dtype and shape."""
        total = check_size(out, dtype, shape, "out")
        data = gather([payload] if isinstance(payload, memoryview) else payload)
        if not _HEADER.size <= data.nbytes <= self.max_wire_bytes(total):
            raise CodecError(f"lossless payload: {data.nbytes} bytes for {total} raw ones")
        magic, version, mode, centre, coded = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != LOSSLESS_VERSION:
            raise CodecError(f"lossless payload: {magic!r} version {version}, expected {_MAGIC!r} {LOSSLESS_VERSION}")
        body = data[_HEADER.size :]
        count = prod(shape)
        if mode == _Mode.STORED and coded == 0 and body.nbytes == total:
            scatter(body, out)
            return
        if mode not in (_Mode.PLAIN, _Mode.CENTRED):
            raise CodecError(f"lossless payload: mode {mode} with {body.nbytes} bytes for {total} raw ones")
        if body.nbytes != coded + total - count:
            raise CodecError(f"lossless payload: {body.nbytes} bytes follow, expected {coded} and {total - count}")
        columns = prod(shape[1:]) if mode == _Mode.CENTRED else 0
        top = self._coder.decompress(body[:coded], columns + count, "lossless payload")
        if mode == _Mode.CENTRED:
            means = top[:columns] + np.uint8(centre)
            top = (top[columns:].reshape(-1, columns) + means).reshape(-1)
        scatter(_join(top, body[coded:], dtype).data.cast("B"), out)

    def max_wire_bytes(self, raw_bytes: int) -> int:
        """The raw bytes and the header."""
        return raw_bytes + _HEADER.size


def _words(data: memoryview, dtype: DType) -> _Words:
    return np.frombuffer(data, np.dtype("<u4" if dtype.itemsize == 4 else "<u2"))


def _centred(top: _Bytes) -> tuple[_Bytes, int]:
    """The channels' means less their own mean, and then each row less the means: all modulo 256."""
    means = ((top.sum(0, dtype=np.uint32) + top.shape[0] // 2) // top.shape[0]).astype(np.uint8)
    centre = int(means.mean())
    joined = np.empty(means.size + top.size, np.uint8)
    np.subtract(means, np.uint8(centre), out=joined[: means.size])
    np.subtract(top, means, out=joined[means.size :].reshape(top.shape))
    return joined, centre


def _low_planes(rotated: _Words) -> list[_Words]:
    """All but the top byte of every element."""
    if rotated.itemsize == 2:
        return [rotated.astype(np.uint8)]
    return [rotated.astype("<u2"), (rotated >> 16).astype(np.uint8)]


def _join(top: _Bytes, low: memoryview, dtype: DType) -> _Words:
    """The inverse of the rotation and the split."""
    if dtype.itemsize == 2:
        rotated: _Words = np.frombuffer(low, np.uint8).astype("<u2")
        rotated |= top.astype("<u2") << 8
    else:
        rotated = np.frombuffer(low[: 2 * top.size], "<u2").astype("<u4")
        rotated |= np.frombuffer(low[2 * top.size :], np.uint8).astype("<u4") << 16
        rotated |= top.astype("<u4") << 24
    return (rotated >> 1) | (rotated << (rotated.itemsize * 8 - 1))
