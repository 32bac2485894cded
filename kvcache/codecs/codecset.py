"""Which codec carries which piece: one for all, or others for some groups and tensors, in a name that both ends parse.

The name is the default codec's, then any number of ``,GROUP=CODEC`` or ``,GROUP.TENSOR=CODEC``: ``int8,state=fp16``
sends fp32 states as fp16 and all else as int8; ``int4,full.v=int8`` spends more on the values of full attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvcache.codecs.base import Codec, CodecError, UnknownCodec
from kvcache.codecs.transform import Transform
from kvcache.layout import GroupKind, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import Piece, TransferPlan

_MAX_NAME = 256

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class CodecSet:
    """``default`` and what replaces it; ``choices`` are keyed by group kind and tensor name, "" for any tensor."""

    name: str
    default: Codec | Transform
    choices: dict[tuple[GroupKind, str], Codec | Transform]

    def of(self, plan: TransferPlan, piece: Piece) -> Codec:
        """The codec of a piece: its tensor's own, its group's, or the default.

        Raises CodecError for a tensor that a transform was not calibrated for.
        """
        group = plan.layout.groups[piece.group]
        return self._codec(group.kind, group.layers[piece.layer], plan.tensor(piece))

    @property
    def members(self) -> frozenset[str]:
        """Names of all codecs in it: a transfer may use the set where every one was offered."""
        return frozenset(codec.name for codec in (self.default, *self.choices.values()))

    @property
    def exact(self) -> bool:
        """Whether all its codecs are."""
        return all(codec.exact for codec in (self.default, *self.choices.values()))

    def check(self, layout: KVLayout) -> None:
        """Raise CodecError unless each tensor of ``layout`` has a codec that carries it, and each choice a tensor."""
        tensors = [(g.kind, layer, spec) for g in layout.groups for layer in g.layers for spec in layer.tensors]
        for kind, layer, spec in tensors:
            codec = self._codec(kind, layer, spec)
            if spec.dtype not in codec.dtypes:
                raise CodecError(
                    f"codec {self.name!r}: {codec.name} does not carry {spec.dtype}, which {kind}.{spec.name} is; "
                    f"add ,{kind}.{spec.name}=CODEC"
                )
        for kind, name in self.choices:
            if not any(kind is k and name in ("", spec.name) for k, _, spec in tensors):
                raise CodecError(f"codec {self.name!r}: the model's cache has no {kind}{name and '.' + name}")

    def _codec(self, kind: GroupKind, layer: LayerSpec, spec: TensorSpec) -> Codec:
        found = self.choices.get((kind, spec.name)) or self.choices.get((kind, "")) or self.default
        if not isinstance(found, Transform):
            return found
        if kind is GroupKind.STATE:
            raise CodecError(f"codec {self.name!r}: a transform carries what grows with tokens; add ,state=CODEC")
        return found.codec(layer.index, spec)


def parse(name: str, known: Mapping[str, Codec | Transform]) -> CodecSet:
    """The set of this name. Raises UnknownCodec naming what is wrong."""
    if len(name) > _MAX_NAME:
        raise UnknownCodec(f"codec: a name of {len(name)} characters, at most {_MAX_NAME} are read")
    default, *rest = name.split(",")
    choices: dict[tuple[GroupKind, str], Codec | Transform] = {}
    for choice in rest:
        place, equals, codec = choice.partition("=")
        kind, dot, tensor = place.partition(".")
        if not equals or kind not in set(GroupKind) or bool(dot) != bool(tensor):
            kinds = ", ".join(GroupKind)
            raise UnknownCodec(f"codec {name!r}: {choice!r} is not GROUP=CODEC or GROUP.TENSOR=CODEC with {kinds}")
        if (GroupKind(kind), tensor) in choices:
            raise UnknownCodec(f"codec {name!r}: {place} is chosen twice")
        choices[GroupKind(kind), tensor] = find(codec, known)
    return CodecSet(name, find(default, known), choices)


def find(name: str, known: Mapping[str, Found]) -> Found:
    """The codec of this name. Raises UnknownCodec."""
    try:
        return known[name]
    except KeyError:
        raise UnknownCodec(f"codec {name!r} is unknown; known are {', '.join(known)}") from None
