"""Which engine a node runs, and how it is started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.process import EngineProcess
from engines.protocol import Engine, Loading
from engines.spec import EngineSpec
from engines.vllm.engine import VllmEngine
from engines.vllm.spec import VllmSpec
from kvcache.blocks import BLOCK_TOKENS
from kvcache.hostpool import HostPool
from node.config import ConfigError, NodeConfig
from node.model import NodeModel

EMBEDDED, VLLM = "embedded", "vllm"
ENGINES = (EMBEDDED, VLLM)

StartEngine = Callable[[HostPool], Awaitable[Engine]]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The kind of engine; for vLLM the Python of its venv, what is passed on to it, and a connector beside ours."""

    kind: str = EMBEDDED
    python: Path | None = None
    arguments: tuple[str, ...] = ()
    beside: Mapping[str, Any] | None = None


def engine_choice(kind: str, python: Path | None, arguments: str, beside: Path | None) -> EngineChoice:
    """What the flags say. Raises ConfigError naming one that cannot be, or that has no effect."""
    if kind == EMBEDDED:
        for flag, value in (("python", python), ("args", arguments), ("connector", beside)):
            if value:
                raise ConfigError(f"--engine-{flag}: is of --engine vllm; the embedded engine has none")
        return EngineChoice()
    if python is None:
        raise ConfigError("--engine-python: missing; name the Python of the venv that vLLM is installed in")
    try:
        words = tuple(shlex.split(arguments))
    except ValueError as error:
        raise ConfigError(f"--engine-args: {error}; quote as a shell would want it") from error
    return EngineChoice(kind, python, words, _connector(beside) if beside is not None else None)


def start_engine(
    choice: EngineChoice, config: NodeConfig, model: NodeModel, on_loading: Callable[[Loading], None]
) -> StartEngine:
    """Starts engines of this kind. Raises ConfigError for flags of vLLM that do not go together."""
    if choice.kind == EMBEDDED:
        return _embedded(config, on_loading)
    assert choice.python is not None
    try:
        spec = VllmSpec(
            model_dir=config.model_dir.absolute(),
            layout=model.layout,
            dtype=config.dtype,
            python=choice.python.absolute(),
            arguments=choice.arguments,
            beside=choice.beside,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=config.chunk_tokens,
            threads=config.threads,
            max_running=config.max_running,
            max_queue=config.max_queue,
        )
    except ValueError as error:
        raise ConfigError(f"--engine-args: {error}") from error

    async def start(pool: HostPool) -> Engine:
        return await VllmEngine.start(spec, pool, on_loading)

    return start


def _embedded(config: NodeConfig, on_loading: Callable[[Loading], None]) -> StartEngine:
    spec = EngineSpec(
        model_dir=config.model_dir,
        dtype=config.dtype,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=config.chunk_tokens,
        threads=config.threads,
        max_running=config.max_running,
        max_queue=config.max_queue,
    )

    async def start(pool: HostPool) -> Engine:
        return await EngineProcess.start(spec, pool, on_loading)

    return start


def _connector(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--engine-connector: {file}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("kv_connector"), str):
        raise ConfigError(f"--engine-connector: {file} must hold an object with kv_connector, as vLLM takes it")
    return found
