"""Which engine a node's flags ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.config import ConfigError
from node.engines import EngineChoice, engine_choice

PYTHON = Path("/venv/bin/python")


def test_the_embedded_engine_needs_nothing() -> None:
    assert engine_choice("embedded", None, "", None) == EngineChoice()


@pytest.mark.parametrize(
    ("python", "arguments", "connector", "flag"),
    [
        (PYTHON, "", None, "--engine-python"),
        (None, "--x", None, "--engine-args"),
        (None, "", PYTHON, "--engine-connector"),
    ],
)
def test_flags_of_vllm_are_refused_without_it(
    python: Path | None, arguments: str, connector: Path | None, flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        engine_choice("embedded", python, arguments, connector)


def test_vllm_wants_to_know_its_python() -> None:
    with pytest.raises(ConfigError, match="--engine-python: missing"):
        engine_choice("vllm", None, "", None)


def test_arguments_are_split_as_a_shell_would() -> None:
    choice = engine_choice("vllm", PYTHON, "--enforce-eager --hf-overrides '{\"a\": 1}'", None)
    assert choice.arguments == ("--enforce-eager", "--hf-overrides", '{"a": 1}')
    with pytest.raises(ConfigError, match="--engine-args"):
        engine_choice("vllm", PYTHON, "'open", None)


def test_another_connector_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nixl.json"
    file.write_text(json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}))
    choice = engine_choice("vllm", PYTHON, "", file)
    assert choice.beside is not None
    assert choice.beside["kv_connector"] == "NixlConnector"


@pytest.mark.parametrize("text", ["[]", "{}", "not json", '{"kv_connector": 3}'])
def test_a_file_that_names_no_connector_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--engine-connector"):
        engine_choice("vllm", PYTHON, "", file)
