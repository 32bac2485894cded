"""Which tensor of vLLM's KV cache is which layer of our layout, checked before anything is exported or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.vllm.shards import Shard, shard_of
from kvcache.layout import DType, GroupKind, KVLayout


class Unservable(ValueError):
    """A vLLM server whose cache this connector cannot exchange; the text names what is in the way."""


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer's cache as vLLM describes it. ``group`` is the KV cache group that its block ids come from.

    ``kind`` is the name of vLLM's spec class, ``window`` None where the layer sees everything; ``heads`` are this
    rank's.
    """

    name: str
    index: int
    group: int
    kind: str
    window: int | None
    heads: int
    k_dim: int
    v_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a vLLM layer lies in our layout: layer ``n`` of group ``g``, of which this rank has the heads in ``shard``.

    ``blocks`` is vLLM's group, ``block_tokens`` its block size.
    """

    name: str
    g: int
    n: int
    blocks: int
    block_tokens: int
    shard: Shard


_ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec")


def map_layers(
    layout: KVLayout, layers: Sequence[CacheLayer], block_tokens: Sequence[int], rank: int, ranks: int
) -> tuple[Place, ...]:
    """Where every layer of vLLM's cache lies in ``layout``; ``block_tokens`` by vLLM's groups.

    Raises Unservable for a layer that one side has and the other has not, or has otherwise.
    """
    if any(group.kind is GroupKind.STATE for group in layout.groups):
        raise Unservable(
            "the model keeps recurrent states (Mamba or linear attention), which this connector does not exchange; "
            "serve it with --engine embedded"
        )
    wanted = {layer.index: (g, n) for g, group in enumerate(layout.groups) for n, layer in enumerate(group.layers)}
    places = []
    for layer in layers:
        if layer.kind not in _ATTENTION:
            raise Unservable(f"layer {layer.name}: a cache of kind {layer.kind} is not exchanged by this connector")
        where = wanted.pop(layer.index, None)
        if where is None:
            raise Unservable(
                f"layer {layer.name}: the model's layout has no such layer, or has it once (a draft model's?)"
            )
        places.append(_place(layout, layer, *where, block_tokens[layer.group], rank, ranks))
    if wanted:
        raise Unservable(f"vLLM keeps no KV of the model's layers {sorted(wanted)} on this rank")
    return tuple(places)


def _place(layout: KVLayout, layer: CacheLayer, g: int, n: int, block: int, rank: int, ranks: int) -> Place:
    group = layout.groups[g]
    k, v = group.layers[n].tensors
    heads, k_dim = k.shape
    try:
        shard = shard_of(heads, rank, ranks)
    except ValueError as error:
        raise Unservable(f"layer {layer.name}: {error}") from error
    for what, ours, theirs in (
        ("window", group.window, layer.window),
        ("heads of this rank", shard.count, layer.heads),
        ("K dim", k_dim, layer.k_dim),
        ("V dim", v.shape[1], layer.v_dim),
        ("dtype", str(DType(k.dtype)), layer.dtype),
    ):
        if ours != theirs:
            raise Unservable(f"layer {layer.name}: {what} is {theirs} in vLLM and {ours} in the model's layout")
    return Place(layer.name, g, n, layer.group, block, shard)
