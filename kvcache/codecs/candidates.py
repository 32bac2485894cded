"""The sets of codecs worth choosing from for one model: what a node offers, measures and reports."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache import codecs
from kvcache.codecs.base import Codec, CodecError
from kvcache.codecs.codecset import CodecSet
from kvcache.codecs.transform import Transform
from kvcache.layout import DType, GroupKind, KVLayout


def candidates(layout: KVLayout, transforms: Sequence[Transform] = ()) -> tuple[CodecSet, ...]:
    """A set for each codec, and for each calibration at hand, that carries what the layout holds.

    It is used for all tensors, but an inexact one not for states, whose errors would be carried on through decoding:
    those of fp32 go as fp16, others lossless.
    """
    found: dict[str, CodecSet] = {}
    known: list[Codec | Transform] = [*codecs.ALL, *transforms]
    for codec in known:
        name = codec.name if codec.exact else ",".join((codec.name, *_states(layout, codec.name)))
        candidate = codecs.set_by_name(name, transforms)
        try:
            candidate.check(layout)
        except CodecError:
            continue
        found[name] = candidate
    return tuple(found.values())


def _states(layout: KVLayout, codec: str) -> list[str]:
    """What replaces an inexact codec for the states of a layout; nothing where that is the codec itself."""
    dtypes: dict[str, set[DType]] = {}
    for group in layout.groups:
        if group.kind is GroupKind.STATE:
            for layer in group.layers:
                for spec in layer.tensors:
                    dtypes.setdefault(spec.name, set()).add(spec.dtype)
    chosen = {name: "fp16" if found == {DType.FLOAT32} else "lossless" for name, found in dtypes.items()}
    if len(set(chosen.values())) == 1:
        only = next(iter(chosen.values()))
        return [] if only == codec else [f"{GroupKind.STATE}={only}"]
    return [f"{GroupKind.STATE}.{name}={other}" for name, other in sorted(chosen.items()) if other != codec]
