"""vLLM's layers against the model's layout: what does not fit is refused by name, before anything is exchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.vllm.mapping import CacheLayer, Unservable, map_layers
from engines.vllm.shards import Shard, shard_of
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from tests.engines.vllm.fake_vllm import hybrid_layout

LAYOUT = hybrid_layout(heads=2, dim=8, window=40, layers=3)


def layers(heads: int = 2) -> list[CacheLayer]:
    kinds = ["SlidingWindowSpec", "SlidingWindowSpec", "FullAttentionSpec"]
    return [
        CacheLayer(f"model.layers.{n}.attn", n, n // 2, kind, 40 if n < 2 else None, heads, 8, 8, "bfloat16")
        for n, kind in enumerate(kinds)
    ]


def test_every_layer_has_its_place() -> None:
    places = map_layers(LAYOUT, layers(), [16, 32], 0, 1)
    assert [(place.g, place.n, place.blocks, place.block_tokens) for place in places] == [
        (1, 0, 0, 16),
        (1, 1, 0, 16),
        (0, 0, 1, 32),
    ]
    assert {place.shard for place in places} == {Shard(0, 2)}


def test_a_sliding_layer_may_lie_in_a_full_group_as_it_does_without_the_hybrid_manager() -> None:
    flat = [replace(layer, kind="FullAttentionSpec", group=0) for layer in layers()]
    assert len(map_layers(LAYOUT, flat, [16], 0, 1)) == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 48}, "window is 48 in vLLM and 40"),
        ({"heads": 4}, "heads of this rank is 4 in vLLM and 2"),
        ({"k_dim": 16}, "K dim is 16 in vLLM and 8"),
        ({"v_dim": 4}, "V dim is 4 in vLLM and 8"),
        ({"dtype": "uint8"}, "dtype is uint8 in vLLM and bfloat16"),
        ({"kind": "MambaSpec"}, "a cache of kind MambaSpec is not exchanged"),
        ({"kind": "MLAAttentionSpec"}, "a cache of kind MLAAttentionSpec is not exchanged"),
        ({"index": 7}, "the model's layout has no such layer"),
    ],
)
def test_a_layer_that_differs_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    first, *others = layers()
    with pytest.raises(Unservable, match=named) as refused:
        map_layers(LAYOUT, [replace(first, **changes), *others], [16, 16], 0, 1)  # type: ignore[arg-type]
    assert first.name in str(refused.value)


def test_a_layer_that_vllm_lacks_is_refused() -> None:
    with pytest.raises(Unservable, match=r"keeps no KV of the model's layers \[2\]"):
        map_layers(LAYOUT, layers()[:2], [16, 16], 0, 1)


def test_a_layer_that_comes_twice_is_a_draft_models() -> None:
    with pytest.raises(Unservable, match="draft model"):
        map_layers(LAYOUT, [*layers(), replace(layers()[0], name="draft.layers.0.attn")], [16, 16], 0, 1)


def test_a_model_with_states_is_refused_with_the_cure() -> None:
    states = GroupSpec(GroupKind.STATE, (LayerSpec(9, (TensorSpec("conv", DType.FLOAT32, (4, 4)),)),))
    with pytest.raises(Unservable, match=r"recurrent states.*--engine embedded"):
        map_layers(KVLayout((*LAYOUT.groups, states)), layers(), [16, 16], 0, 1)


@pytest.mark.parametrize(
    ("heads", "rank", "ranks", "shard"),
    [
        (8, 1, 4, Shard(2, 2)),
        (1, 0, 2, Shard(0, 1)),
        (1, 1, 2, Shard(0, 1, exports=False)),
        (2, 3, 4, Shard(1, 1, False)),
    ],
)
def test_ranks_split_heads_and_one_of_those_that_share_exports(heads: int, rank: int, ranks: int, shard: Shard) -> None:
    assert shard_of(heads, rank, ranks) == shard


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(Unservable, match="2 KV heads cannot be split over 3"):
        map_layers(LAYOUT, layers(), [16, 16], 0, 3)
