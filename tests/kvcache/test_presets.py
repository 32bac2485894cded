"""The named layouts against published sizes."""

from __future__ import annotations

import pytest

from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config
from kvcache.presets import case_study_1t, dense_70b, gemma3_270m

# arXiv 2604.15039, table of the case-study model.
PUBLISHED_MIB = {1024: 190.8, 8192: 308.9, 32000: 701.3, 130000: 2316.3}


@pytest.mark.parametrize("tokens", [1, 1000, 131072])
def test_the_70b_model_takes_327680_bytes_per_token(tokens: int) -> None:
    assert dense_70b().s_kv(tokens) == 327_680 * tokens


def test_the_70b_preset_is_the_layout_of_its_config() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
    }
    assert dense_70b() == layout_from_config(config, DType.BFLOAT16)


@pytest.mark.parametrize("tokens", PUBLISHED_MIB)
def test_the_case_study_model_meets_the_published_sizes(tokens: int) -> None:
    assert abs(case_study_1t().s_kv(tokens) / 2**20 - PUBLISHED_MIB[tokens]) <= 0.1


def test_the_case_study_model_has_a_fixed_state_and_grows_by_17280_bytes_a_token() -> None:
    layout = case_study_1t()
    assert layout.s_kv(5001) - layout.s_kv(5000) == 17_280
    assert layout.s_kv(1) - 17_280 == pytest.approx(173.9 * 2**20, abs=1000)


def test_gemma_is_the_layout_of_its_config() -> None:
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_size": 640,
        "sliding_window": 512,
    }
    assert gemma3_270m() == layout_from_config(config, DType.BFLOAT16)


def test_gemma_keeps_511_tokens_of_its_windows() -> None:
    token_bytes = 1024
    assert gemma3_270m().s_kv(3000) == 3 * token_bytes * 3000 + 15 * token_bytes * 511
    assert gemma3_270m().s_kv(100) == 18 * token_bytes * 100
