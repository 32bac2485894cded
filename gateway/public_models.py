"""KV throughput of public models: S_kv worked out from their configs, T_prefill fitted to a published table.

The table is that of arXiv 2604.15039 for 8 x H200 (SGLang 0.5.9). It prints Phi_kv = S_kv / T_prefill and neither of
the two, so a time follows from it only with a size, here that of a bf16 cache with fp32 recurrent states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config
from scheduler.profiles import KvSize, PrefillProfile, fit_prefill

SOURCE = "arXiv 2604.15039, table of KV throughput, one instance of 8 x H200"
TOKENS = (1024, 8192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class PublicModel:
    """The fields of a model's config that its cache depends on, where they come from, and its published Phi_kv."""

    name: str
    config: Mapping[str, Any]
    config_source: str
    phi_gbps: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class KvThroughput:
    """One model's figures at ``TOKENS``: ``seconds`` is S_kv over the published Phi_kv, ``fitted`` a curve through it.

    ``fit_error`` is the curve's largest relative error.
    """

    model: PublicModel
    size: KvSize
    seconds: tuple[float, ...]
    fitted: PrefillProfile
    fit_error: float


MODELS = (
    PublicModel(
        "Kimi-Linear-48B-A3B",
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 27,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        "config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct, as its quantised copies carry it",
        (1.19, 2.29, 3.87, 4.88),
    ),
    PublicModel(
        "MiMo-V2-Flash",
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 128,
        },
        "defaults of transformers' MiMoV2FlashConfig, which are those of XiaomiMiMo/MiMo-V2-Flash",
        (0.82, 2.85, 4.66, 4.71),
    ),
    PublicModel(
        "Qwen3.5-397B-A17B",
        {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        "text_config of Qwen/Qwen3.5-397B-A17B, as projects that load it quote it",
        (4.13, 6.28, 8.25, 7.47),
    ),
    PublicModel(
        "MiniMax-M2.5",
        {
            "model_type": "minimax_m2",
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        "config.json of MiniMax-M2.1 and of MiniMax-M2.7, which agree, and defaults of transformers' MiniMaxM2Config",
        (4.94, 32.87, 59.93, 47.82),
    ),
    PublicModel(
        "Qwen3-235B-A22B",
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        "Qwen/Qwen3-235B-A22B, as the training configurations of slime and MindSpeed-RL state it",
        (4.12, 22.42, 33.35, 21.50),
    ),
)

LEFT_OUT = {
    "Ring-2.5-1T": "its model_type, bailing_hybrid, has no layout here, and its sizes are not known for certain",
}


def kv_throughput(model: PublicModel) -> KvThroughput:
    """S_kv of a model from its config, and the prefill time that the published Phi_kv gives it."""
    size = KvSize.of(layout_from_config(model.config, DType.BFLOAT16))
    seconds = tuple(size.nbytes(float(tokens)) * 8e-9 / phi for tokens, phi in zip(TOKENS, model.phi_gbps, strict=True))
    fitted, error = fit_prefill(f"{model.name} on 8 x H200", TOKENS, seconds)
    return KvThroughput(model, size, seconds, fitted, error)
