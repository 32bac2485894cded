"""The start-up check: right models pass in both dtypes, lost states do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engines.embedded.allowed import ARCHITECTURES
from engines.embedded.cache import StateLayer, TokenLayer
from engines.embedded.model import LanguageModel, load
from engines.embedded.selfcheck import STEPS, TOLERANCE, trial_tokens, try_out, worst_error
from engines.spec import EngineSpec
from kvcache.layout import DType
from kvcache.plan import chunk_bounds


def loaded(path: Path, dtype: DType) -> LanguageModel:
    with torch.inference_mode():
        return load(EngineSpec(path, dtype), json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", ["gemma3_text:64", *(name for name in ARCHITECTURES if "gemma" not in name)])
def test_right_models_pass_and_are_timed(model_dir: Callable[[str], Path], name: str, dtype: DType) -> None:
    with torch.inference_mode():
        trial = try_out(loaded(model_dir(name), dtype), dtype, 64, compare=True)
    assert trial.prefill_tokens_per_s > 0
    assert trial.decode_tokens_per_s > 0


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("chunk", [64, 256])
def test_jambas_states_that_restart_at_every_chunk_are_seen(
    model_dir: Callable[[str], Path], dtype: DType, chunk: int
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir("jamba"), dtype=getattr(torch, dtype))
    ids = trial_tokens(512, chunk)

    @torch.inference_mode()
    def run(bounds: list[tuple[int, int]]) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        return torch.cat([model.model(ids[None, a:b], past_key_values=cache).last_hidden_state[0] for a, b in bounds])

    stop = ids.numel() - STEPS
    steps = [(n, n + 1) for n in range(stop, ids.numel())]
    chunked = run([*chunk_bounds(0, stop, chunk), *steps])
    assert worst_error(chunked, run([(0, ids.numel())]), chunk) > TOLERANCE[dtype]
    assert worst_error(run([(0, stop), *steps]), run([(0, ids.numel())]), chunk) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "bamba", "falcon_h1", "granitemoehybrid"])
def test_a_recurrent_state_that_is_lost_between_chunks_is_refused(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, dtype: DType
) -> None:
    model = loaded(model_dir(name), dtype)
    keep = StateLayer.update_recurrent_state

    def forget(self: StateLayer, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return keep(self, torch.zeros_like(states), *args, **kwargs)

    monkeypatch.setattr(StateLayer, "update_recurrent_state", forget)
    with torch.inference_mode(), pytest.raises(ValueError, match="self-check: prefill in chunks of 64 differs"):
        try_out(model, dtype, 64, compare=True)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_a_window_that_is_too_short_is_refused(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, dtype: DType
) -> None:
    model = loaded(model_dir("gemma3_text:64"), dtype)
    monkeypatch.setattr(TokenLayer, "_oldest", lambda self: max(self.base, self.length - 10) if self.window else 0)
    with torch.inference_mode(), pytest.raises(ValueError, match="self-check"):
        try_out(model, dtype, 64, compare=True)
