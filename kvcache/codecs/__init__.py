"""KV codecs, by name. Host memory and numpy only."""

from __future__ import annotations

from kvcache.codecs.base import Buffer, Codec, CodecError, UnknownCodec
from kvcache.codecs.lossless import Lossless
from kvcache.codecs.raw import Raw

__all__ = ["EXACT", "Buffer", "Codec", "CodecError", "UnknownCodec", "by_name"]

_ALL: tuple[Codec, ...] = (Raw(), Lossless())
_CODECS = {codec.name: codec for codec in _ALL}

EXACT = tuple(name for name, codec in _CODECS.items() if codec.exact)


def by_name(name: str) -> Codec:
    """The codec of this name. Raises UnknownCodec."""
    try:
        return _CODECS[name]
    except KeyError:
        raise UnknownCodec(f"codec {name!r} is unknown; known are {', '.join(_CODECS)}") from None
