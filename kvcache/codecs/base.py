"""What a codec is: a pair of functions between a piece's raw bytes and the bytes that travel."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol, TypeAlias

from kvcache.layout import DType

Buffer: TypeAlias = bytes | bytearray | memoryview


class CodecError(ValueError):
    """A payload that this codec did not make for this piece: damaged, truncated, too long or of another version.

    Or, from an encoder, values that this codec cannot carry: no codec falls back to another, silently or otherwise.
    """


class UnknownCodec(ValueError):
    """No codec has this name."""


class Codec(Protocol):
    """Stateless towards its callers and safe to use from many threads at once; long work releases the GIL.

    ``views`` and ``out`` are the piece's raw bytes in canonical order, in as many parts as the pool's pages make of
    them; their total is prod(shape) elements of dtype. No part needs to hold whole elements.
    """

    @property
    def name(self) -> str:
        """The name on the wire and in decisions."""

    @property
    def exact(self) -> bool:
        """Whether decode(encode(x)) is x, bit for bit."""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that it carries; others raise CodecError."""

    def encode(self, views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...]) -> Sequence[Buffer]:
        """The bytes to send, in parts; they may be ``views`` themselves, so these must stay unchanged until sent.

        Raises ValueError where the views do not hold what dtype and shape say, CodecError for what it cannot carry.
        """

    def decode(
        self,
        payload: Sequence[memoryview] | memoryview,
        out: Sequence[memoryview],
        dtype: DType,
        shape: tuple[int, ...],
    ) -> None:
        """Fill ``out`` from ``payload`` (one buffer or its parts in order).

        Raises CodecError for a payload that is not exactly one encoding of such a piece; ``out`` then holds rubbish.
        Memory use is bounded by the raw size, whatever the payload claims.
        """

    def max_wire_bytes(self, raw_bytes: int) -> int:
        """The most that ``raw_bytes`` can encode to: a receiver refuses more before reading it."""


class TensorCodec(Codec, Protocol):
    """A codec whose arithmetic runs on numpy arrays and torch tensors alike, with equal bytes from both.

    ``words`` are a piece's bits, int32 for fp32 and int16 for the others, in canonical order.
    """

    def encode_tensor(self, words: Any, dtype: DType, shape: tuple[int, ...]) -> Sequence[Buffer]:
        """``encode`` for an array in either namespace, on any device. Raises CodecError for what it cannot carry."""

    def decode_tensor(self, payload: memoryview, dtype: DType, shape: tuple[int, ...], like: Any) -> Any:
        """The words, flat, in the namespace and on the device of ``like``. Raises CodecError as ``decode`` does."""


def check_size(views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...], field: str) -> int:
    """The total bytes of ``views``. Raises ValueError unless it is what dtype and shape say, and more than nothing."""
    total = sum(view.nbytes for view in views)
    expected = prod(shape) * dtype.itemsize
    if total != expected or total == 0:
        raise ValueError(f"{field}: {total} bytes, but {shape} of {dtype} takes {expected}")
    return total


def gather(parts: Sequence[memoryview]) -> memoryview:
    """All parts as one run of bytes: without a copy where there is just one."""
    return parts[0].cast("B") if len(parts) == 1 else memoryview(b"".join(parts))


def scatter(data: memoryview, out: Sequence[memoryview]) -> None:
    """Copy a run of bytes into parts of the same total size."""
    done = 0
    for part in out:
        target = part.cast("B")
        target[:] = data[done : done + target.nbytes]
        done += target.nbytes
    assert done == data.nbytes
