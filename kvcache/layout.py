"""What a KV cache is made of: groups of layers, their tensors, and how many bytes l tokens take.

A cache is an ordered tuple of groups. ``FULL`` tensors grow with every token, ``SLIDING`` ones keep the last
``window - 1`` tokens (the query's own token completes the window), ``STATE`` tensors have a fixed size and are valid at
exactly one position. A layer may appear in two groups (falcon_h1 holds attention and a state side by side).

The canonical order of bytes, on the wire and in the host pool, is (group, layer, tensor, token, head, dim).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod


class DType(StrEnum):
    """Element types a cache may hold; the value is the name that PyTorch and safetensors users know."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


class GroupKind(StrEnum):
    """How a group's bytes depend on the number of tokens."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of one layer.

    ``shape`` is per token, (heads, dim), in a FULL or SLIDING group, and the whole tensor's in a STATE group.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per token, or of the whole state."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The tensors that one model layer keeps in one group."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per token, or of the whole state, over all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers whose bytes obey one rule. ``window`` is the attention window W of a SLIDING group, else None."""

    kind: GroupKind
    layers: tuple[LayerSpec, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.SLIDING) != (self.window is not None):
            raise ValueError(
                f"group {self.kind}: a window belongs to sliding groups and to no other, got {self.window}"
            )
        if self.window is not None and self.window < 2:
            raise ValueError(f"sliding group: window must be at least 2, got {self.window}")
        if not self.layers:
            raise ValueError(f"group {self.kind}: no layers")

    def first_token(self, position: int) -> int:
        """The oldest token whose bytes this group still holds when ``position`` tokens have been read."""
        if self.kind is GroupKind.SLIDING:
            assert self.window is not None
            return max(0, position - (self.window - 1))
        return 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All groups of one model's cache. Equal layouts hold interchangeable bytes."""

    groups: tuple[GroupSpec, ...]

    def s_kv(self, tokens: int) -> int:
        """S_kv(l): bytes of the cache after ``tokens`` tokens, states at their stored dtype, framing excluded."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        total = 0
        for group in self.groups:
            held = 1 if group.kind is GroupKind.STATE else tokens - group.first_token(tokens)
            total += held * sum(layer.nbytes for layer in group.layers)
        return total if tokens else 0
