"""A codec calibrated for one model: each tensor of each layer in coordinates of its own, most of which are then zero.

Calibration finds, per layer, tensor and head, coordinates in which values are uncorrelated and an error of a given size
does equal harm (see ``Basis``). There one step for all coordinates is reverse water-filling: a coordinate gets as many
bits as its deviation has doublings over the step, and none below it. What is left is coded by Huffman in classes of
coordinates of like magnitude, several small values to a byte, because a Huffman code spends a bit at least.

All products are of integers held in fp64 and below 2**53: every library and device yields the same bits.

Payload, little-endian: ``"KT" version:u8 zero:u8``, then frames, each ``size:u32`` and a zstd frame: first the class of
each coordinate (a byte each, head after head), then the values of each class that occurs, coordinate after coordinate.
A calibration is known by its id; one file of numpy arrays holds it, ``kv-transform-<id>.npz``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.arrays import (
    Array,
    cast,
    decode_on_host,
    encode_on_host,
    floats,
    from_host,
    largest,
    namespace,
    to_host,
    words_of,
)
from kvcache.codecs.base import Buffer, CodecError
from kvcache.codecs.entropy import HuffmanCoder
from kvcache.layout import DType, TensorSpec

TRANSFORM_VERSION = 1

_MAGIC = b"KT"
_HEADER = struct.Struct("<2sBx")
_SIZE = struct.Struct("<I")
FACTOR_BITS = 20
"""Inputs and factors of a product are integers below two to this, so a product of up to 2**13 terms stays exact."""
_INVERSE_BITS = 24
_MOST = 32767


@dataclass(frozen=True, slots=True)
class Packing:
    """A class of coordinates: values of at most ``top`` in magnitude, ``together`` of them in a byte."""

    top: int
    together: int

    @property
    def base(self) -> int:
        """How many values there are."""
        return 2 * self.top + 1


# Class 0 is all zeros; a class that no byte holds takes two.
_CLASSES = (
    Packing(0, 0),
    Packing(1, 5),
    Packing(2, 3),
    Packing(3, 2),
    Packing(7, 2),
    Packing(15, 1),
    Packing(127, 1),
    Packing(_MOST, 0),
)
_TOPS = np.array([packing.top for packing in _CLASSES])


@dataclass(frozen=True, slots=True)
class Basis:
    """The coordinates of one tensor of one layer, heads apart.

    Coordinates are ``round((x - means) * fineness) @ forward * to_steps`` in steps, and values ``means + steps @
    inverse * from_steps``. ``means`` is fp32 (heads, dim), the factors are integers in fp64 (heads, dim, dim).
    """

    means: NDArray[np.float32]
    forward: NDArray[np.float64]
    inverse: NDArray[np.float64]
    fineness: float
    to_steps: float
    from_steps: float

    @classmethod
    def of(
        cls,
        means: NDArray[Any],
        forward: NDArray[Any],
        inverse: NDArray[Any],
        reach: float,
        step: float,
    ) -> Basis:
        """From real factors: coordinates are ``(x - means) @ forward``; ``reach`` is the largest deviation seen."""
        fineness = 2.0 ** np.floor(np.log2(2.0**14 / reach))
        scale = (2.0**FACTOR_BITS - 1) / np.abs(forward).max()
        back = (2.0**_INVERSE_BITS - 1) / np.abs(inverse).max()
        return cls(
            means.astype(np.float32),
            np.round(forward * scale),
            np.round(inverse * back),
            float(fineness),
            float(1 / (scale * fineness * step)),
            float(step / back),
        )

    def steps(self, values: Array) -> Array:
        """fp32 (rows, heads, dim) as int32 steps, (heads, dim, rows)."""
        xp = namespace(values)
        bound = 2.0**FACTOR_BITS - 1
        centred = xp.clip((values - from_host(self.means, values)) * self.fineness, -bound, bound)
        rows = cast(xp.round(centred), "float64").swapaxes(0, 1)
        found = xp.clip(xp.round(rows @ from_host(self.forward, values) * self.to_steps), -_MOST, _MOST)
        return cast(found.swapaxes(1, 2), "int32")

    def values(self, steps: Array) -> Array:
        """The inverse: int32 (heads, dim, rows) to fp32 (rows, heads, dim)."""
        rows = cast(steps, "float64").swapaxes(1, 2) @ from_host(self.inverse, steps)
        return cast(rows.swapaxes(0, 1) * self.from_steps + from_host(self.means, steps), "float32")


class TransformCodec:
    """One tensor's part of a calibration. Its pieces are (rows, heads, dim), as the basis is."""

    exact = False
    dtypes = tuple(DType)

    def __init__(self, name: str, basis: Basis) -> None:
        self.name = name
        self._basis = basis
        self._coder = HuffmanCoder()

    @property
    def shape(self) -> tuple[int, ...]:
        """Per token, as it was calibrated: (heads, dim)."""
        return self._basis.means.shape

    def encode(self, views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...]) -> Sequence[Buffer]:
        """Header and frames. Raises ValueError where the views do not hold what dtype and shape say.

        Raises CodecError for a shape that is not the calibrated one and for values that it cannot carry.
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
        """Two bytes per value that nothing compresses, what zstd adds then, classes and sizes."""
        return 2 * raw_bytes + raw_bytes // 64 + 1024

    def encode_tensor(self, words: Array, dtype: DType, shape: tuple[int, ...]) -> list[Buffer]:
        """``encode`` for the piece's bits as int16 (int32 for fp32), numpy or torch: the bytes are equal."""
        self._check(shape)
        values = floats(words.reshape(shape), dtype)
        largest(values, self.name)
        table = to_host(self._basis.steps(values)).reshape(-1, shape[0])
        classes = np.searchsorted(_TOPS, np.abs(table).max(1)).astype(np.uint8)
        frames = [self._coder.compress(classes)]
        for number, packing in enumerate(_CLASSES[1:], 1):
            chosen = table[classes == number]
            if chosen.size:
                frames.append(self._coder.compress(_packed(chosen.reshape(-1), packing)))
        return [_HEADER.pack(_MAGIC, TRANSFORM_VERSION), *(_SIZE.pack(len(frame)) + frame for frame in frames)]

    def decode_tensor(self, payload: memoryview, dtype: DType, shape: tuple[int, ...], like: Array) -> Array:
        """The piece's bits as int16 or int32, flat, in the namespace and on the device of ``like``.

        Raises CodecError as ``decode`` does.
        """
        self._check(shape)
        if payload.nbytes < _HEADER.size or _HEADER.unpack_from(payload) != (_MAGIC, TRANSFORM_VERSION):
            raise CodecError(f"{self.name} payload: no header of version {TRANSFORM_VERSION} in {payload.nbytes} bytes")
        frames = _Frames(payload[_HEADER.size :], self._coder, f"{self.name} payload")
        rows, heads, dim = shape
        classes = frames.next(heads * dim)
        if classes.max() >= len(_CLASSES):
            raise CodecError(f"{self.name} payload: class {classes.max()}")
        table = np.zeros((heads * dim, rows), np.int32)
        for number, packing in enumerate(_CLASSES[1:], 1):
            chosen = classes == number
            count = int(chosen.sum()) * rows
            if count:
                table[chosen] = _unpacked(frames.next(_packed_bytes(count, packing)), count, packing).reshape(-1, rows)
        frames.end()
        values = self._basis.values(from_host(table.reshape(heads, dim, rows), like))
        return words_of(values, dtype).reshape(-1)

    def _check(self, shape: tuple[int, ...]) -> None:
        if shape[1:] != self.shape:
            raise CodecError(f"{self.name}: calibrated for (tokens, {self.shape[0]}, {self.shape[1]}), not for {shape}")


class Transform:
    """A calibration: what each tensor of each model layer travels in. ``name`` says which to the other end."""

    exact = False

    def __init__(self, name: str, bases: Mapping[tuple[int, str], Basis]) -> None:
        self.name = name
        self._codecs = {key: TransformCodec(name, basis) for key, basis in bases.items()}

    def codec(self, layer: int, spec: TensorSpec) -> TransformCodec:
        """The codec of a tensor of a model layer. Raises CodecError for one that was not calibrated so."""
        found = self._codecs.get((layer, spec.name))
        if found is None or found.shape != spec.shape:
            shape = None if found is None else found.shape
            raise CodecError(f"{self.name}: {spec.name} of layer {layer}, {spec.shape}, was calibrated as {shape}")
        return found


class _Frames:
    """The frames of one payload, one after another."""

    def __init__(self, data: memoryview, coder: HuffmanCoder, what: str) -> None:
        self._data, self._coder, self._what = data, coder, what

    def next(self, size: int) -> NDArray[np.uint8]:
        """The next frame's ``size`` bytes. Raises CodecError."""
        if self._data.nbytes < _SIZE.size:
            raise CodecError(f"{self._what}: a frame is missing")
        (length,) = _SIZE.unpack_from(self._data)
        frame, self._data = self._data[_SIZE.size : _SIZE.size + length], self._data[_SIZE.size + length :]
        if frame.nbytes != length:
            raise CodecError(f"{self._what}: {frame.nbytes} of a frame's {length} bytes")
        return self._coder.decompress(frame, size, self._what)

    def end(self) -> None:
        """Raise CodecError where anything is left."""
        if self._data.nbytes:
            raise CodecError(f"{self._what}: {self._data.nbytes} bytes too many")


def _packed_bytes(count: int, packing: Packing) -> int:
    return -(-count // packing.together) if packing.together else 2 * count


def _packed(values: NDArray[np.int32], packing: Packing) -> NDArray[np.uint8]:
    if not packing.together:
        return values.astype("<i2").view(np.uint8)
    digits = np.zeros(_packed_bytes(values.size, packing) * packing.together, np.uint8)
    digits[: values.size] = values + packing.top
    packed = digits[:: packing.together].copy()
    for place in range(1, packing.together):
        packed *= np.uint8(packing.base)
        packed += digits[place :: packing.together]
    return packed


def _unpacked(packed: NDArray[np.uint8], count: int, packing: Packing) -> NDArray[Any]:
    """Raises CodecError for a byte that ``_packed`` does not make."""
    if not packing.together:
        return packed.view("<i2")
    if packed.max() >= packing.base**packing.together:
        raise CodecError(f"transform payload: a byte of {packed.max()} in base {packing.base}")
    digits = np.empty((packed.size, packing.together), np.uint8)
    rest = packed
    for place in reversed(range(packing.together)):
        rest, digits[:, place] = np.divmod(rest, np.uint8(packing.base))
    return digits.reshape(-1)[:count].astype(np.int32) - packing.top
