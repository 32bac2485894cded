"""What tests of the real vLLM share: how its servers are started, and how they are looked into from outside."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from tests.stacks import children, command_line

CHUNK = 512
KV_BYTES = 256 << 20
ARGUMENTS = ("--enforce-eager", "--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", "9000")


def node_options(vllm_python: Path) -> tuple[str, ...]:
    """A node's options for a small vLLM server."""
    return (
        *("--engine", "vllm", "--engine-python", str(vllm_python), "--engine-args", " ".join(ARGUMENTS)),
        *("--chunk-tokens", str(CHUNK), "--max-running", "8"),
    )


def server_pid(node_pid: int) -> int:
    """The API server of a node's vLLM."""
    found = [pid for pid in children(node_pid) if b"engines.vllm.launch" in command_line(pid)]
    assert found, "the node has no vLLM server"
    return found[0]


def vllm_metrics(pid: int) -> dict[str, float]:
    """Gauges and counters of a server that listens on a unix socket, summed over labels."""
    arguments = command_line(pid).split(b"\0")
    socket = arguments[arguments.index(b"--uds") + 1].decode()
    with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=10) as http:
        text = http.get("http://vllm/metrics").text
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def blocks_in_use(pid: int) -> float:
    """The share of vLLM's KV blocks that requests hold."""
    return vllm_metrics(pid)["vllm:kv_cache_usage_perc"]
