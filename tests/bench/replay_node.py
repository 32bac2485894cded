"""A prefill node that computes nothing: empty KV of as many tokens as asked for, at once.

For measurements of what a transfer does to its receiver, on machines that prefill slower than links carry.
``command`` stands for ``prfaas node``.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

import node.cli
from engines.protocol import Engine, EngineInfo, Loading
from gateway.model import ServedModel, load_model
from kvcache.blocks import BLOCK_TOKENS, PageGeometry
from kvcache.hostpool import HostPool
from kvcache.plan import plan_transfer
from node.bench.kv.recording import CHUNK_TOKENS, Recording
from node.bench.kv.replay import ReplayEngine
from node.config import NodeConfig
from node.engines import EngineChoice, StartEngine
from node.model import NodeModel

TOKENS_PER_S = 1e6


class EmptyEngine(ReplayEngine):
    """Exports zeros, and claims to be the engine of a model."""

    def __init__(self, model: ServedModel, pool: HostPool) -> None:
        plan = plan_transfer(model.layout, 0, CHUNK_TOKENS, CHUNK_TOKENS)
        zeros = {(p.group, p.layer, p.tensor): memoryview(bytes(p.nbytes)) for p in plan.pieces}
        super().__init__(PageGeometry.of(model.layout, BLOCK_TOKENS), pool, Recording(model.layout, zeros))
        self._model = model

    @property
    def info(self) -> EngineInfo:
        """Fast, and otherwise what every node of the model must say."""
        sizes = {"context_tokens": self._model.context_tokens, "vocab_size": self._model.vocab_size}
        return replace(super().info, prefill_tokens_per_s=TOKENS_PER_S, **sizes)


def command() -> None:
    """Run the node command with such an engine."""
    vars(node.cli)["start_engine"] = _empty_engine
    node.cli.node()


def _empty_engine(
    choice: EngineChoice, config: NodeConfig, model_files: NodeModel, on_loading: Callable[[Loading], None]
) -> StartEngine:
    model = load_model(config.model_dir, config.model_name, config.dtype)

    async def start(pool: HostPool) -> Engine:
        return EmptyEngine(model, pool)

    return start
