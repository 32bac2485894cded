"""From a spec to a loop that is ready to serve: load, self-check, measure."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engines.embedded.jobs import Limits
from engines.embedded.loop import EngineLoop
from engines.embedded.model import load
from engines.embedded.pages import PageMemory
from engines.embedded.selfcheck import try_out
from engines.protocol import Command, EngineEvent, EngineInfo, Loading
from engines.spec import EngineSpec
from kvcache.hostpool import HostPool


@torch.inference_mode()
def start(
    spec: EngineSpec,
    config: Mapping[str, Any],
    pool: HostPool,
    inbox: queue.Queue[Command],
    send: Callable[[EngineEvent], None],
) -> tuple[EngineLoop, EngineInfo]:
    """Load the model whose config.json is ``config``. Raises ValueError or OSError, saying why it cannot be served."""
    torch.set_num_threads(spec.threads)
    send(Loading("weights", 0.2))
    model = load(spec, config)
    context = spec.context_tokens or model.context_tokens
    if context > model.context_tokens:
        raise ValueError(f"context_tokens {context} is above the model's limit of {model.context_tokens}")
    send(Loading("self-check", 0.6))
    trial = try_out(model, spec.dtype, spec.chunk_tokens, compare=spec.self_check)
    limits = Limits(model.layout, spec.block_tokens, model.vocab_size, context)
    loop = EngineLoop(model, model.end_tokens, limits, spec, PageMemory(pool), inbox, send)
    info = EngineInfo(
        architecture=str(config["model_type"]),
        dtype=str(spec.dtype),
        context_tokens=context,
        vocab_size=model.vocab_size,
        chunk_tokens=spec.chunk_tokens,
        prefill_tokens_per_s=round(trial.prefill_tokens_per_s, 1),
        decode_tokens_per_s=round(trial.decode_tokens_per_s, 1),
    )
    return loop, info
