"""Attention over latents against attention over the keys and values that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.embedded import attention, latent
from engines.embedded.cache import empty_cache
from engines.embedded.model import LanguageModel, load
from engines.embedded.ragged import join
from engines.spec import EngineSpec
from kvcache.layout import DType
from tests.engines.harness import prompt

HEADS, RANK, NOPE, ROPE, V = 4, 32, 16, 8, 24


@pytest.fixture(scope="module")
def model(model_dir: Callable[[str], Path]) -> LanguageModel:
    path = model_dir("deepseek_v3")
    with torch.inference_mode():
        return load(EngineSpec(path, DType.FLOAT32), json.loads((path / "config.json").read_text()))


def layer_of(model: LanguageModel) -> Any:
    return model.body.layers[1].self_attn


def kept(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 1, tokens, RANK), torch.randn(1, 1, tokens, ROPE)


def expanded(layer: Any, held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    keys, values = type(layer).expand_kv(layer, *held)
    return keys, values


@torch.inference_mode()
@pytest.mark.parametrize("n", [1, 2, 20, 64, 100])
def test_a_chunk_over_latents_equals_one_over_keys_and_values(model: LanguageModel, n: int) -> None:
    layer, held, query = layer_of(model), kept(300), torch.randn(1, HEADS, n, NOPE + ROPE)
    mask = torch.full((n, 300), float("-inf")).triu(301 - n)[None, None] if n > 1 else None
    ours, _ = latent.attend(layer, query, *held, mask, 0.3)
    theirs, _ = attention.attend(layer, query, *expanded(layer, held), mask, 0.3)
    torch.testing.assert_close(ours, theirs.view(1, n, HEADS, V), atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_rows_of_different_lengths_attend_each_to_their_own_latents(model: LanguageModel) -> None:
    layer, rows = layer_of(model), [kept(tokens) for tokens in (5, 300, 64)]
    query = torch.randn(3, HEADS, 1, NOPE + ROPE)
    ours, _ = latent.attend(layer, query, [row[0] for row in rows], [row[1] for row in rows], None, 0.3)
    assert ours.shape == (3, 1, HEADS, V)
    for i, row in enumerate(rows):
        alone, _ = attention.attend(layer, query[i : i + 1], *expanded(layer, row), None, 0.3)
        torch.testing.assert_close(ours[i : i + 1], alone, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_step_never_expands_its_context(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([prompt(300)])
    cache = empty_cache(model.layout, 301)
    model.hidden(ids, torch.arange(300)[None], cache)
    with monkeypatch.context() as broken:
        broken.setattr(type(layer_of(model)), "expand_kv", lambda *_: 1 / 0)
        for held in (cache, join([cache, empty_cache(model.layout, 1)])):
            rows = 1 if held is cache else 2
            model.hidden(torch.full((rows, 1), 5), torch.full((rows, 1), 300), held)
        with pytest.raises(ZeroDivisionError):
            model.hidden(ids, torch.arange(300)[None], empty_cache(model.layout, 300))


@torch.inference_mode()
def test_plain_attention_gets_keys_and_values_and_ours_latents_again(model: LanguageModel) -> None:
    layer, held = layer_of(model), kept(10)
    assert all(mine is given for mine, given in zip(layer.expand_kv(*held), held, strict=True))
    with model.plain_attention():
        assert [tuple(t.shape) for t in layer.expand_kv(*held)] == [(1, HEADS, 10, NOPE + ROPE), (1, HEADS, 10, V)]
    assert layer.expand_kv(*held)[0] is held[0]


def test_latents_are_attended_to_as_long_as_that_is_less_work() -> None:
    assert latent.widest_absorbed(rank=512, nope=128, v_dim=128) == 170, "DeepSeek-V3's sizes"
    assert latent.widest_absorbed(rank=32, nope=32, v_dim=32) > 8192, "a latent no wider than the heads: always"
