"""What is loaded, and what is refused before anything runs on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, SiglipVisionConfig

import engines.embedded.model
from engines.embedded.allowed import ARCHITECTURES, KNOWN_WRONG, check_model_type, check_rope
from engines.embedded.cache import empty_cache
from engines.embedded.model import LanguageModel, load
from engines.embedded.selfcheck import try_out
from engines.spec import EngineSpec
from kvcache.layout import DType, KVLayout
from kvcache.layout_configs import layout_from_config
from tests.engines.harness import prompt
from tests.models import tiny_model


def loaded(path: Path, chunk_tokens: int = 64) -> LanguageModel:
    spec = EngineSpec(path, DType.FLOAT32, chunk_tokens=chunk_tokens)
    with torch.inference_mode():
        return load(spec, json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize("model_type", [*KNOWN_WRONG, "deepseek_v2", "mimo_v2_flash", "", "None"])
def test_an_architecture_that_is_not_listed_is_refused_with_the_list(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"'{model_type}' is not supported .*{', '.join(ARCHITECTURES)}") as refused:
        check_model_type({"model_type": model_type})
    assert KNOWN_WRONG.get(model_type, "") in str(refused.value)
    assert model_type not in ARCHITECTURES


@pytest.mark.parametrize("arch", ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_time_steps_that_single_tokens_would_not_keep_within_bounds_are_refused(arch: str, tmp_path: Path) -> None:
    limits: dict[str, Any] = {} if arch == "nemotron_h" else {"time_step_limit": [0.001, 0.1]}
    with pytest.raises(ValueError, match=r"time_step_limit \(0\.001, .*\) is not supported, because single tokens"):
        loaded(tiny_model(arch, tmp_path, **limits))


def test_rotary_embeddings_that_move_with_the_length_are_refused_wherever_they_stand() -> None:
    check_rope({"rope_scaling": None, "rope_parameters": {"rope_type": "llama3"}})
    with pytest.raises(ValueError, match="rope_scaling: rope type 'dynamic'"):
        check_rope({"rope_scaling": {"type": "dynamic"}})
    with pytest.raises(ValueError, match="full_attention: rope type 'longrope'"):
        check_rope({"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}})


def test_states_ask_for_chunks_of_whole_inner_chunks(model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be a multiple of 64 for qwen3_next, got 100"):
        loaded(model_dir("qwen3_next"), chunk_tokens=100)
    assert loaded(model_dir("llama"), chunk_tokens=100)


@pytest.mark.parametrize("name", ["llama", "gemma3_text:64", "qwen3_next", "deepseek_v3", "falcon_h1"])
def test_a_layout_that_differs_from_the_real_cache_is_refused(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def wrong(config: dict[str, object], dtype: DType) -> KVLayout:
        layout = layout_from_config(config, dtype)
        last = layout.groups[-1]
        tensor = last.layers[0].tensors[0]
        thin = replace(tensor, shape=(tensor.shape[0], tensor.shape[1] + 1))
        layer = replace(last.layers[0], tensors=(thin, last.layers[0].tensors[1]))
        return KVLayout((*layout.groups[:-1], replace(last, layers=(layer, *last.layers[1:]))))

    monkeypatch.setattr(engines.embedded.model, "layout_from_config", wrong)
    with pytest.raises(ValueError, match=r"layer \d: the layout says"):
        loaded(model_dir(name))


def copy_of(model: Path, path: Path) -> Path:
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_a_weight_that_is_not_in_the_files_is_named_and_never_made_up(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copy_of(model_dir("llama"), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path / "model.safetensors")
    del weights[name]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"the weights lack {name} and 0 more; fetch"):
        loaded(path)


def test_weights_of_another_shape_are_refused_in_one_line(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    path = copy_of(model_dir("llama"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ValueError, match=r"^the weights do not load: [^\n]+; fetch the model again$"):
        loaded(path)


def test_end_tokens_come_from_the_generation_config_or_else_the_model(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    copy_of(model_dir("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    assert loaded(tmp_path).end_tokens == (1, 106)
    (tmp_path / "generation_config.json").unlink()
    assert loaded(tmp_path).end_tokens == (1,)


def test_the_language_model_inside_a_multimodal_gemma_is_run_alone(
    tmp_path: Path, model_dir: Callable[[str], Path]
) -> None:
    text = json.loads((model_dir("gemma3_text:64") / "config.json").read_text())
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text, vision_config=vision.to_dict(), mm_tokens_per_image=4)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    ids = torch.tensor([prompt(150)])
    with torch.inference_mode():
        try_out(model, DType.FLOAT32, 64, compare=True)
        hidden = model.hidden(ids, torch.arange(150)[None], empty_cache(model.layout, 150))
        expected = whole(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits[:, -1]
        torch.testing.assert_close(model.logits(hidden[:, -1]), expected, atol=1e-4, rtol=1e-4)
