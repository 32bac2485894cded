"""KV codecs, by name. Functions of numpy arrays or torch tensors; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.codecs.base import Buffer, Codec, CodecError, TensorCodec, UnknownCodec
from kvcache.codecs.codecset import CodecSet, find, parse
from kvcache.codecs.half import Half
from kvcache.codecs.lossless import Lossless
from kvcache.codecs.quantised import Kind, Quantised
from kvcache.codecs.raw import Raw
from kvcache.codecs.transform import Transform
from kvcache.quality import Quality

__all__ = [
    "ALL",
    "EXACT",
    "TENSOR_CODECS",
    "Buffer",
    "Codec",
    "CodecError",
    "CodecSet",
    "TensorCodec",
    "Transform",
    "UnknownCodec",
    "by_name",
    "offered",
    "set_by_name",
]

TENSOR_CODECS: tuple[TensorCodec, ...] = (
    Half(),
    Quantised(Kind.FP8),
    Quantised(Kind.INT8),
    Quantised(Kind.INT4),
)
"""Those whose arithmetic runs where the tensor lives. All are inexact."""

ALL: tuple[Codec, ...] = (Raw(), Lossless(), *TENSOR_CODECS)
_CODECS = {codec.name: codec for codec in ALL}

EXACT = tuple(name for name, codec in _CODECS.items() if codec.exact)


def offered(quality: Quality, transforms: Iterable[Transform]) -> tuple[str, ...]:
    """What a receiver with these calibrations offers at this level: transforms belong to the last."""
    return (*quality.codecs, *(transform.name for transform in transforms if quality is Quality.COMPACT))


def by_name(name: str) -> Codec:
    """The codec of this name. Raises UnknownCodec."""
    return find(name, _CODECS)


def set_by_name(name: str, transforms: Iterable[Transform] = ()) -> CodecSet:
    """The codecs that a transfer of this name uses: ``int8`` for all pieces, or as in ``int8,state=fp16``.

    ``transforms`` are the calibrations at hand, known by their names too. Raises UnknownCodec.
    """
    return parse(name, {**_CODECS, **{transform.name: transform for transform in transforms}})
