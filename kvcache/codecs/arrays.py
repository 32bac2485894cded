"""One arithmetic for numpy arrays and torch tensors: the namespace comes from the array that is handed in.

Nothing here imports torch. All functions that codecs build on are exact or correctly rounded element by element, and
sums run over integers held in floats, so that both namespaces, on any device, yield the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.base import Buffer, CodecError, TensorCodec, check_size, gather, scatter
from kvcache.layout import DType

Array: TypeAlias = Any
"""A numpy array, or a torch tensor on any device."""

_LARGEST = {DType.FLOAT16: 65504.0, DType.BFLOAT16: 3.3895313892515355e38, DType.FLOAT32: 3.4028234663852886e38}
# Sums of integers below 2**15 are exact in fp32 up to here, in fp64 up to any size that fits into memory.
_FLOAT32_TERMS = 512
LIMIT = 2.0**100
"""What inexact codecs carry lies below: none of their sums and products overflows then."""
SUM_BITS = 15


def namespace(array: Array) -> Any:
    """The module whose functions work on ``array``: numpy or torch."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def cast(array: Array, dtype: str) -> Array:
    """``array`` as the element type of that name in its namespace."""
    xp = namespace(array)
    return xp.asarray(array, dtype=getattr(xp, dtype))


def host_words(data: memoryview, dtype: DType) -> NDArray[Any]:
    """Raw bytes as the signed integers that the functions below take, without a copy."""
    return np.frombuffer(data, np.dtype("<i4" if dtype is DType.FLOAT32 else "<i2"))


def to_host(array: Array) -> NDArray[Any]:
    """The array in host memory, contiguous, without a copy where it is so already."""
    return np.ascontiguousarray(array if isinstance(array, np.ndarray) else array.cpu().numpy())


def encode_on_host(
    codec: TensorCodec, views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...]
) -> Sequence[Buffer]:
    """``codec.encode`` for a piece in host memory. Raises ValueError where the views do not fit dtype and shape."""
    check_size(views, dtype, shape, "views")
    return codec.encode_tensor(host_words(gather(views), dtype), dtype, shape)


def decode_on_host(
    codec: TensorCodec,
    payload: Sequence[memoryview] | memoryview,
    out: Sequence[memoryview],
    dtype: DType,
    shape: tuple[int, ...],
) -> None:
    """``codec.decode`` into host memory. Raises ValueError where ``out`` does not fit dtype and shape."""
    check_size(out, dtype, shape, "out")
    data = gather([payload] if isinstance(payload, memoryview) else payload)
    scatter(to_host(codec.decode_tensor(data, dtype, shape, np.empty(0))).data.cast("B"), out)


def from_host(array: NDArray[Any], like: Array) -> Array:
    """A host array in the namespace and on the device of ``like``."""
    if isinstance(like, np.ndarray):
        return array
    # A copy: what came off the wire is read-only memory, which torch does not have.
    return namespace(like).asarray(array.copy(), device=like.device)


def floats(words: Array, dtype: DType) -> Array:
    """Words of ``dtype`` (int16 or int32, holding its bits) as fp32, exactly."""
    xp = namespace(words)
    if dtype is DType.BFLOAT16:
        return (cast(words, "int32") << 16).view(xp.float32)
    if dtype is DType.FLOAT16:
        return cast(words.view(xp.float16), "float32")
    return words.view(xp.float32)


def words_of(values: Array, dtype: DType) -> Array:
    """fp32 values rounded to the nearest of ``dtype``, ties to even, as words; too large ones become the largest."""
    xp = namespace(values)
    values = xp.clip(values, -_LARGEST[dtype], _LARGEST[dtype])
    if dtype is DType.BFLOAT16:
        bits = values.view(xp.int32)
        return cast((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16, "int16")
    if dtype is DType.FLOAT16:
        return cast(values, "float16").view(xp.int16)
    return values.view(xp.int32)


def largest(values: Array, codec: str) -> float:
    """The largest magnitude. Raises CodecError where it reaches LIMIT, or a value is not finite."""
    found = float(namespace(values).amax(abs(values)))
    if not found < LIMIT:
        raise CodecError(f"{codec}: the piece holds values up to {found}; only an exact codec carries those")
    return found


def integer_sum(integers: Array, axis: int) -> Array:
    """Sums of integers of at most 2**15 that are held in fp32: exact, so in whatever order they are added."""
    xp = namespace(integers)
    wide = xp.float32 if integers.shape[axis] <= _FLOAT32_TERMS else xp.float64
    return cast(xp.sum(integers, axis=axis, keepdims=True, dtype=wide), "float64")


def rows_heads_columns(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A piece's shape as three axes: the first, all between, the last; a vector is one row."""
    if len(shape) < 2:
        return 1, 1, prod(shape)
    return shape[0], prod(shape[1:-1]), shape[-1]
