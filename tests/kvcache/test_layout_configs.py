"""Layouts against what transformers really caches for tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvcache.layout import DType, GroupKind
from kvcache.layout_configs import UnsupportedArchitecture, layout_from_config, read_config

TOKENS = 37
VOCAB = 64

DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
GDN: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE},
    "llama with head_dim": {**DENSE, "model_type": "llama", "head_dim": 32},
    "llama without num_key_value_heads": {**DENSE, "model_type": "llama", "num_key_value_heads": None},
    "mistral": {**DENSE, "sliding_window": 16},
    "mistral without window": {**DENSE, "model_type": "mistral", "sliding_window": None},
    "mixtral": {**DENSE, **MOE},
    "minimax_m2": {**DENSE, **MOE, "head_dim": 32},
    "qwen2": {**DENSE},
    "qwen3": {**DENSE, "head_dim": 32},
    "qwen3 with windows": {
        **DENSE,
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3_moe": {**DENSE, **MOE, "head_dim": 16},
    "gemma3_text": {**DENSE, "head_dim": 32, "sliding_window": 16, "num_hidden_layers": 7},
    "gemma3 by pattern": {
        **DENSE,
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "mimo_v2_flash": {**DENSE, **MOE, "head_dim": 24, "v_head_dim": 16, "sliding_window": 16},
    "deepseek_v3": {**DENSE, **MOE, **MLA, "first_k_dense_replace": 1},
    "qwen3_next": {**DENSE, **MOE, **GDN},
    "qwen3_5_text": {**DENSE, **GDN},
    "qwen3_5_moe_text": {**DENSE, **MOE, **GDN},
    "kimi_linear": {
        **DENSE,
        **MOE,
        **MLA,
        "q_lora_rank": None,
        "num_hidden_layers": 5,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
    "granitemoehybrid": {
        **DENSE,
        **MOE,
        **MAMBA,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "bamba": {**DENSE, **MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**DENSE, **MAMBA, "mamba_d_ssm": 128},
    "falcon_h1 without d_ssm": {**DENSE, **MAMBA, "model_type": "falcon_h1", "mamba_d_ssm": None},
    "nemotron_h": {
        **DENSE,
        **MOE,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "head_dim": 16,
        "ssm_state_size": 24,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
}


def _cached(config: dict[str, Any]) -> tuple[dict[tuple[int, str, str], tuple[tuple[int, ...], str]], dict[str, Any]]:
    """Every tensor that a tiny model's cache holds after TOKENS tokens, and the config.json it would be saved with."""
    model_type = config["model_type"]
    built = AutoConfig.for_model(model_type, **{k: v for k, v in config.items() if k != "model_type"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16, attn_implementation="eager").eval()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.randint(3, VOCAB, (1, TOKENS)), past_key_values=cache, use_cache=True)
    found = {}

    def note(index: int, kind: str, name: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape[1:])
        if kind == "tokens":
            heads, tokens, dim = shape
            shape = (tokens, heads, dim)
        found[index, kind, name] = (shape, str(tensor.dtype).removeprefix("torch."))

    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None:
            note(index, "tokens", "0", layer.keys)
            note(index, "tokens", "1", layer.values)
        for name in ("conv", "recurrent"):
            states = getattr(layer, f"{name}_states", {0: None})
            assert set(states) == {0}
            if states[0] is not None:
                note(index, "state", name, states[0])
    return found, built.to_dict()


@pytest.mark.parametrize("case", CONFIGS)
def test_a_layout_says_what_transformers_caches(case: str) -> None:
    config = {"model_type": case, **CONFIGS[case]}
    found, saved = _cached(config)
    for source in (config, saved):
        layout = layout_from_config(source, DType.BFLOAT16)
        expected = {}
        for group in layout.groups:
            held = TOKENS - group.first_token(TOKENS)
            for layer in group.layers:
                for t, spec in enumerate(layer.tensors):
                    if group.kind is GroupKind.STATE:
                        expected[layer.index, "state", spec.name] = (spec.shape, str(spec.dtype))
                    else:
                        expected[layer.index, "tokens", str(t)] = ((held, *spec.shape), str(spec.dtype))
        assert expected == found


def test_an_unknown_model_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match="'jamba'"):
        layout_from_config({"model_type": "jamba"}, DType.BFLOAT16)


def test_an_unknown_layer_type_is_refused_by_its_place() -> None:
    config = {"model_type": "llama", **DENSE, "layer_types": ["full_attention", "chunked_attention", "full_attention"]}
    with pytest.raises(UnsupportedArchitecture, match=r"layer_types\[1\] is 'chunked_attention'"):
        layout_from_config(config, DType.BFLOAT16)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {"model_type": "llama", **{k: v for k, v in DENSE.items() if k != field}}
    with pytest.raises(ValueError, match=f"{field} is missing"):
        layout_from_config(config, DType.BFLOAT16)


def test_a_list_of_layer_types_must_have_as_many_entries_as_layers() -> None:
    with pytest.raises(ValueError, match="layer_types lists 2 layers, num_hidden_layers says 3"):
        layout_from_config({"model_type": "llama", **DENSE, "layer_types": ["full_attention"] * 2}, DType.BFLOAT16)


def test_a_multimodal_config_is_read_at_its_text_config() -> None:
    text = {"model_type": "gemma3_text", **DENSE, "head_dim": 32, "sliding_window": 16}
    nested = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_hidden_layers": 99}}
    assert layout_from_config(nested, DType.BFLOAT16) == layout_from_config(text, DType.BFLOAT16)


def test_a_model_in_fp32_takes_twice_the_bytes_but_for_its_recurrent_states() -> None:
    config = {"model_type": "qwen3_next", **DENSE, **GDN}
    half, single = (layout_from_config(config, dtype) for dtype in (DType.BFLOAT16, DType.FLOAT32))
    recurrent = sum(
        tensor.nbytes
        for g in half.groups
        for layer in g.layers
        for tensor in layer.tensors
        if tensor.name == "recurrent"
    )
    assert single.s_kv(100) - recurrent == 2 * (half.s_kv(100) - recurrent)


def test_a_nemotron_pattern_reads_as_its_letters() -> None:
    config = {"model_type": "nemotron_h", **CONFIGS["nemotron_h"]}
    spelled = {k: v for k, v in config.items() if k != "layers_block_type"} | {"hybrid_override_pattern": "ME*-M"}
    assert layout_from_config(spelled, DType.BFLOAT16) == layout_from_config(config, DType.BFLOAT16)


def test_kimi_linear_reads_the_layer_lists_of_its_published_checkpoint() -> None:
    config = {"model_type": "kimi_linear", **CONFIGS["kimi_linear"]}
    published = {k: v for k, v in config.items() if not k.startswith("linear_")} | {
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [5],
            "kda_layers": [1, 2, 3, 4],
        }
    }
    assert layout_from_config(published, DType.BFLOAT16) == layout_from_config(config, DType.BFLOAT16)


def test_a_bidirectional_gemma_is_refused() -> None:
    config = {"model_type": "gemma3_text", **DENSE, "sliding_window": 16, "use_bidirectional_attention": True}
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        layout_from_config(config, DType.BFLOAT16)


@pytest.mark.parametrize("value", [-3, 0, 1.5, "x", True, [4], {}])
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"])
def test_a_count_that_is_none_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {field} must be a positive integer, got "):
        layout_from_config(DENSE | {"model_type": "llama", field: value}, DType.FLOAT32)


def test_more_layers_than_any_model_has_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers is 1000000000"):
        layout_from_config(DENSE | {"model_type": "llama", "num_hidden_layers": 10**9}, DType.FLOAT32)


@pytest.mark.parametrize("change", [{"text_config": 5}, {"layer_types": "full_attention"}, {"layer_types": [1, 2, 3]}])
def test_a_field_of_another_type_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {next(iter(change))} must be "):
        layout_from_config(DENSE | {"model_type": "llama"} | change, DType.FLOAT32)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe{}", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"config\.json is not "):
        read_config(tmp_path)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no config.json"):
        read_config(tmp_path)
