"""Small random-weight models with tokenisers, built on the fly: every test of the path runs on real architectures."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

VOCAB = 512
PAD, EOS, BOS, UNK = 0, 1, 2, 3
CONTEXT = 8192


def tiny_model(arch: str, path: Path, *, window: int = 64, seed: int = 0, **sizes: Any) -> Path:
    """Write config, fp32 safetensors and tokenizer.json of a small ``arch`` into ``path`` and return it.

    ``arch`` is gemma3_text (``window`` applies), llama, deepseek_v3, kimi_linear, qwen3_next, bamba, falcon_h1,
    granitemoehybrid, nemotron_h or jamba. Equal arguments give equal bytes. Weights are wide (std 0.2), so that a lost
    token or a wrong state moves the logits by far more than rounding does. ``sizes`` replace fields of the config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = _config(arch, window)
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2)
            elif name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("mamba.dt_bias"):  # as built, a state forgets within two or three tokens
                parameter.normal_(-2.0, 1.0)
            elif name.endswith("mamba.D"):  # as built, the way around the state outweighs it
                parameter.fill_(0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.generation_config.eos_token_id = EOS
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer of exactly ``VOCAB`` tokens that puts BOS in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    specials = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<unk>": UNK}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = dict(specials) | {symbol: len(specials) + n for n, symbol in enumerate(alphabet)}
    merges = list(itertools.islice(itertools.product("Ġaeiounrst", string.ascii_lowercase), VOCAB - len(vocab)))
    vocab |= {left + right: len(vocab) + n for n, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))


def _config(arch: str, window: int) -> Any:
    from transformers import (
        BambaConfig,
        DeepseekV3Config,
        FalconH1Config,
        Gemma3TextConfig,
        GraniteMoeHybridConfig,
        JambaConfig,
        KimiLinearConfig,
        LlamaConfig,
        NemotronHConfig,
        Qwen3NextConfig,
    )

    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "tie_word_embeddings": False,
    }
    moe: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
    }
    mla = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    mamba = {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_chunk_size": 64,
        "num_key_value_heads": 2,
    }
    match arch:
        case "deepseek_v3":
            yarn = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
            yarn["original_max_position_embeddings"] = CONTEXT // 4
            return DeepseekV3Config(
                **shared,
                **mla,
                **moe,
                num_hidden_layers=3,
                first_k_dense_replace=1,
                q_lora_rank=24,
                rope_parameters=yarn,
            )
        case "kimi_linear":
            types = ["linear_attention", "full_attention", "linear_attention"]
            linear = {"linear_num_heads": 4, "linear_head_dim": 16}
            return KimiLinearConfig(**shared, **mla, **moe, **linear, num_hidden_layers=3, layer_types=types)
        case "bamba":
            return BambaConfig(**shared, **mamba, num_hidden_layers=3, attn_layer_indices=[1])
        case "falcon_h1":
            multipliers = {"lm_head_multiplier": 0.5, "key_multiplier": 0.7, "ssm_out_multiplier": 1.3}
            return FalconH1Config(**shared, **mamba, **multipliers, mamba_d_ssm=128, num_hidden_layers=3)
        case "granitemoehybrid":
            types = ["mamba", "attention", "mamba"]
            scales = {"logits_scaling": 2.0, "attention_multiplier": 0.25, "residual_multiplier": 0.8}
            return GraniteMoeHybridConfig(**shared, **mamba, **moe, **scales, num_hidden_layers=3, layer_types=types)
        case "nemotron_h":
            return NemotronHConfig(
                **shared,
                layers_block_type=["mamba", "attention", "mlp", "mamba"],
                num_key_value_heads=2,
                head_dim=16,
                ssm_state_size=24,
                mamba_num_heads=8,
                mamba_head_dim=16,
                n_groups=2,
                chunk_size=64,
            )
        case "llama":
            return LlamaConfig(**shared, num_hidden_layers=3, num_key_value_heads=2)
        case "gemma3_text":
            return Gemma3TextConfig(
                **shared,
                num_hidden_layers=4,
                num_key_value_heads=2,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=window,
                layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            )
        case "qwen3_next":
            return Qwen3NextConfig(
                **shared,
                num_hidden_layers=4,
                num_key_value_heads=2,
                head_dim=32,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=24,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
            )
        case "jamba":
            return JambaConfig(
                **shared,
                num_hidden_layers=4,
                num_key_value_heads=2,
                attn_layer_period=4,
                attn_layer_offset=3,
                num_experts=2,
                num_experts_per_tok=1,
                mamba_d_state=8,
                mamba_dt_rank=8,
            )
    raise ValueError(f"no tiny model for {arch!r}")
