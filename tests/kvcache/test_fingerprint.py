"""What counts as the same model, and what is named where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcache.fingerprint import Fingerprint, fingerprint_of
from kvcache.layout import DType
from kvcache.layout_configs import UnsupportedArchitecture

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "rope_theta": 10000.0,
}
WEIGHTS = {"a.weight": np.arange(4096, dtype=np.float32), "b.weight": np.ones((8, 8), np.float32)}


def model(
    path: Path,
    config: dict[str, Any] = CONFIG,
    files: dict[str, dict[str, np.ndarray]] | None = None,
    tokenizer: str = "{}",
    metadata: dict[str, str] | None = None,
) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer)
    for name, tensors in (files or {"model": WEIGHTS}).items():
        save_file(tensors, path / f"{name}.safetensors", metadata=metadata)
    return path


def fingerprint(path: Path, dtype: DType = DType.BFLOAT16, revision: str = "") -> Fingerprint:
    return fingerprint_of(path, dtype, revision)


@pytest.fixture
def base(tmp_path: Path) -> Fingerprint:
    return fingerprint(model(tmp_path / "base"))


def test_a_copy_has_the_same_fingerprint(tmp_path: Path, base: Fingerprint) -> None:
    copy = fingerprint(model(tmp_path / "copy"))
    assert copy == base
    assert copy.digest() == base.digest()
    assert copy.difference(base) is None


def test_sharding_metadata_and_saving_library_make_no_difference(tmp_path: Path, base: Fingerprint) -> None:
    other = model(
        tmp_path / "sharded",
        config={**CONFIG, "transformers_version": "9.9", "torch_dtype": "float32", "sliding_window": None},
        files={"model-1": {"b.weight": WEIGHTS["b.weight"]}, "model-2": {"a.weight": WEIGHTS["a.weight"]}},
        metadata={"format": "pt"},
    )
    assert fingerprint(other) == base


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("weights", {"files": {"model": {**WEIGHTS, "b.weight": np.full((8, 8), 2, np.float32)}}}),
        ("weights", {"files": {"model": {**WEIGHTS, "b.weight": np.ones((4, 16), np.float32)}}}),
        ("weights", {"files": {"model": {**WEIGHTS, "c.weight": np.ones(1, np.float32)}}}),
        ("weights", {"config": {**CONFIG, "rope_theta": 500000.0}}),
        ("tokenizer", {"tokenizer": '{"version": 2}'}),
    ],
)
def test_what_differs_is_named(tmp_path: Path, base: Fingerprint, field: str, changes: dict[str, Any]) -> None:
    other = fingerprint(model(tmp_path / "other", **changes))
    assert base.difference(other) == field
    assert other.digest() != base.digest()


def test_dtype_and_revision_are_part_of_it(tmp_path: Path, base: Fingerprint) -> None:
    path = model(tmp_path / "other")
    assert base.difference(fingerprint(path, revision="v2")) == "weights"
    other = fingerprint(path, DType.FLOAT32)
    assert other.weights == base.weights
    assert {name for name in base.parts() if base.parts()[name] != other.parts()[name]} == {"layout", "dtype"}


def test_parts_go_there_and_back(base: Fingerprint) -> None:
    assert Fingerprint.from_parts({**base.parts(), "added_later": "x"}) == base


def test_missing_parts_are_named(base: Fingerprint) -> None:
    parts = base.parts()
    del parts["tokenizer"]
    with pytest.raises(ValueError, match="fingerprint: tokenizer is missing"):
        Fingerprint.from_parts(parts)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = model(tmp_path / "m")
    (path / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.replace("model", r"\*")):
        fingerprint(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02",
        (1 << 62).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{",
        (9).to_bytes(8, "little") + b'{"a": {}}',
    ],
)
def test_a_damaged_weights_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = model(tmp_path / "m")
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        fingerprint(path)


def test_a_weights_file_cut_short_is_named(tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-16384])
    with pytest.raises(ValueError, match="cut off"):
        fingerprint(path)


def test_an_unsupported_model_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match="'jamba'"):
        fingerprint(model(tmp_path / "m", config={"model_type": "jamba"}))
