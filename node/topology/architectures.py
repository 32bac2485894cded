"""The three architectures that the projection compares, from fields of their public configs."""

from __future__ import annotations

from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config
from kvcache.presets import dense_70b
from scheduler.topology.projection import Architecture


def architectures() -> tuple[Architecture, ...]:
    """Dense with GQA, mixture of experts with GQA, mixture of experts with MLA; bf16 caches."""
    qwen = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return (
        Architecture("70B", "dense, GQA", dense_70b(), 70e9, "80 layers, 8 KV heads of 128, as the paper has it"),
        Architecture(
            "Qwen3-235B-A22B",
            "MoE, GQA",
            layout_from_config(qwen, DType.BFLOAT16),
            22e9,
            "config of Qwen/Qwen3-235B-A22B",
        ),
        Architecture(
            "DeepSeek-V3",
            "MoE, MLA",
            layout_from_config(deepseek, DType.BFLOAT16),
            37e9,
            "config of deepseek-ai/DeepSeek-V3",
        ),
    )
