"""How a node starts its vLLM server: its model and limits, and the command line that follows from them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.blocks import BLOCK_TOKENS
from kvcache.layout import DType, KVLayout

CONNECTOR = "PrfaasConnector"
CONNECTOR_MODULE = "engines.vllm.connector"
EVENT_TOPIC = "kv"
OURS = (
    *("--model", "--served-model-name", "--dtype", "--uds", "--host", "--port", "--kv-transfer-config"),
    *("--max-num-batched-tokens", "--max-num-seqs", "--scheduling-policy", "--api-key", "--kv-events-config"),
)
"""Arguments that the node sets itself."""


@dataclass(frozen=True, slots=True)
class VllmSpec:
    """One server. ``python`` is the interpreter of vLLM's own venv; ``arguments`` are passed on to vLLM.

    ``chunk_tokens`` is what vLLM computes in one step at most, and the grid of transfers, so that a layer's KV leaves
    while the next one is computed. ``beside`` is the configuration of another connector to run with ours, in vLLM's
    MultiConnector, None for none. ``start_s`` bounds the start.
    """

    model_dir: Path
    layout: KVLayout
    dtype: DType
    python: Path = Path(sys.executable)
    arguments: tuple[str, ...] = ()
    beside: Mapping[str, Any] | None = None
    block_tokens: int = BLOCK_TOKENS
    chunk_tokens: int = 256
    threads: int = 1
    max_running: int = 16
    max_queue: int = 64
    start_s: float = 600.0

    def __post_init__(self) -> None:
        for argument in self.arguments:
            name = argument.split("=", 1)[0].replace("_", "-")
            if name in OURS:
                raise ValueError(f"{name} is set by the node itself; use the node's own flags")
        if self.chunk_tokens < self.max_running:
            raise ValueError(
                f"chunk_tokens: {self.chunk_tokens} is below the {self.max_running} answers that may run at once; "
                "vLLM computes one token of each in every step"
            )

    @property
    def max_jobs(self) -> int:
        """Jobs that the server knows of at any time."""
        return self.max_running + self.max_queue

    def transfer_config(self, socket: Path) -> dict[str, Any]:
        """``--kv-transfer-config``: ours alone, or before ``beside``. Both roles, because a node's may change."""
        ours: dict[str, Any] = {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"prfaas_socket": str(socket), "prfaas_block_tokens": self.block_tokens},
        }
        if self.beside is None:
            return ours
        several = {"connectors": [ours, dict(self.beside)]}
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": several}

    def command(self, api: Path, workers: Path, events: Path) -> list[str]:
        """The command line of a server that listens at ``api`` and publishes KV events at ``events``.

        Its workers connect to ``workers``.
        """
        return [
            *(str(self.python), "-m", "engines.vllm.launch", str(os.getpid())),
            *("--model", str(self.model_dir), "--dtype", str(self.dtype), "--uds", str(api)),
            *("--max-num-batched-tokens", str(self.chunk_tokens), "--max-num-seqs", str(self.max_running)),
            *("--scheduling-policy", "priority", "--max-logprobs", "-1", "--enable-scale-out"),
            "--disable-uvicorn-access-log",
            *("--kv-transfer-config", json.dumps(self.transfer_config(workers))),
            *("--kv-events-config", json.dumps(events_config(events))),
            *self.arguments,
        ]

    def environment(self, packages: Path) -> dict[str, str]:
        """Its environment: ``packages`` are all that it gets of this venv. What the caller set for vLLM stays."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
        defaults = {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
        if not any(argument.startswith(("--tensor-parallel-size", "-tp")) for argument in self.arguments):
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a lone worker needs no process of its own
        return (
            defaults
            | kept
            | {
                "PYTHONPATH": str(packages),
                "OMP_NUM_THREADS": str(self.threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONUNBUFFERED": "1",
            }
        )


def events_config(socket: Path) -> dict[str, Any]:
    """``--kv-events-config``: published where nobody but the node can listen."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{socket}", "topic": EVENT_TOPIC}
