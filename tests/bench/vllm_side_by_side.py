"""Two vLLM servers on one machine, prefill in one and decode in the other: this project's path beside vLLM's own NIXL.

``python -m tests.bench.vllm_side_by_side --model DIR --vllm PYTHON --nixl DIR`` prints one JSON line for each length
and system. ``PYTHON`` is that of a venv with vLLM, the directory of ``--nixl`` holds the nixl packages (``pip install
--no-deps --target DIR nixl nixl-cu12``). Each system runs alone, in fresh servers, with the same sizes and limits, over
the loopback or with ``--wan`` with 1 Gbps and a round trip of 30 ms between its two servers.

``ttft_s`` is the client's, streaming, medians of the repeats; ``tail_s`` is what of it comes after the prefill server
has computed the prompt: transfer, load and the decode server's first step. ``local_s`` is the time to first token of
the decode server alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from deploy.demo import long_prompt
from deploy.stack import free_port
from engines.vllm.process import session, shared_memory
from tests.engines_vllm.harness import ARGUMENTS, CHUNK, node_options
from tests.stacks import RunningStack, node, running_stack
from tests.wan.link import Wan, wide_area
from tests.wan.stack import wan_stack

READY_S = 500.0
REQUEST_S = 200.0
TOKENS = 4


class TookAnotherWay(Exception):
    """The remote way was given up as late: the machine did something else meanwhile."""


@dataclass(frozen=True)
class Times:
    """Seconds of one request."""

    ttft: float
    tail: float


def first_token(http: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> float:
    """Seconds until the first event of a streamed answer; the rest is read, too."""
    began, first = time.monotonic(), 0.0
    with http.stream("POST", path, json=body | {"stream": True}, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.monotonic() - began
    return first


# ---- this project


class Ours:
    """A gateway and two vLLM nodes."""

    name = "prfaas"

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack

    def local(self, prompt: Sequence[int]) -> float:
        """The decode node alone."""
        return first_token(self._stack.http, "/v1/completions", self._stack.body(prompt, TOKENS), _hint("local"))

    def split(self, prompt: Sequence[int]) -> Times:
        """Prefilled in the other one. The record knows how long the prefill took, queueing excluded."""
        headers = _hint("remote") | {"x-request-id": f"bench-{time.monotonic_ns()}"}
        ttft = first_token(self._stack.http, "/v1/completions", self._stack.body(prompt, TOKENS), headers)
        record = self._stack.http.get(f"/v1/decisions/{headers['x-request-id']}").json()
        if len(record["attempts"]) != 1:
            raise TookAnotherWay
        (attempt,) = record["attempts"]
        return Times(ttft, ttft - attempt["prefill_s"] - attempt["prefill_started_after_s"])


def _hint(where: str) -> dict[str, str]:
    return {"x-prfaas-route-hint": where}


@contextlib.contextmanager
def ours(model: Path, python: Path, logs: Path, wan: Wan | None) -> Iterator[Ours]:
    options = node_options(python)
    if wan is not None:
        far: dict[str, Any] = {"dtype": "bfloat16", "pool_mib": 512, "ready_s": READY_S, "threshold": 1}
        with wan_stack(wan, model, logs, options=options, **far) as stack:
            yield Ours(stack)
        return
    nodes = (node("east-prefill", "east", "prefill", *options), node("local-decode", "local", "decode", *options))
    settings: dict[str, Any] = {"dtype": "bfloat16", "pool_mib": 512, "nodes": nodes, "ready_s": READY_S}
    with running_stack(model, logs, threshold=1, **settings) as stack:
        yield Ours(stack)


# ---- vLLM's own connector


class Nixl:
    """Two servers with NixlConnector, and what a proxy does: ask the one, hand its answer's parameters to the other."""

    name = "nixl"

    def __init__(self, model: Path, prefill: httpx.Client, decode: httpx.Client) -> None:
        self._model = str(model)
        self._prefill = prefill
        self._decode = decode

    def local(self, prompt: Sequence[int]) -> float:
        """The decode server alone."""
        return first_token(self._decode, "/v1/completions", self._body(prompt))

    def split(self, prompt: Sequence[int]) -> Times:
        """Prefilled in the other one."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        began = time.monotonic()
        body = self._body(prompt) | {"max_tokens": 1, "kv_transfer_params": asked | nothing}
        answer = self._prefill.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        prefilled = time.monotonic() - began
        params = answer.json()["kv_transfer_params"]
        after = first_token(self._decode, "/v1/completions", self._body(prompt) | {"kv_transfer_params": params})
        return Times(prefilled + after, after)

    def _body(self, prompt: Sequence[int]) -> dict[str, Any]:
        fixed = {"temperature": 0, "ignore_eos": True}
        return {"model": self._model, "prompt": list(prompt), "max_tokens": TOKENS} | fixed


@contextlib.contextmanager
def nixl(model: Path, python: Path, packages: Path, logs: Path, wan: Wan | None) -> Iterator[Nixl]:
    """As vLLM starts it, but for one thing: it pins both servers to one processor, and here each may use all.

    With UCX over tcp the progress thread of each agent polls a processor; where those are few, measure it with
    ``enable_prog_thread`` False in ``nixl_cu12/_api.py``, for vLLM has no option for that.
    """
    ends = [("127.0.0.1", None)] * 2 if wan is None else [(wan.near.address, wan.near), (wan.far.address, wan.far)]
    with contextlib.ExitStack() as stack:
        if wan is not None:
            stack.enter_context(wan.far.entered())
        clients, servers, processors = [], [], os.sched_getaffinity(0)
        for (host, end), role in zip(ends, ("kv_producer", "kv_consumer"), strict=True):
            port = free_port()
            config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            command = [
                *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)),
                *("--host", host, "--dtype", "bfloat16", "--max-num-batched-tokens", str(CHUNK)),
                *("--max-num-seqs", "8", "--kv-transfer-config", json.dumps(config), *ARGUMENTS),
            ]
            environment = os.environ | {
                "PYTHONPATH": str(packages),
                "UCX_TLS": "tcp",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "TORCHDYNAMO_DISABLE": "1",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            log = stack.enter_context((logs / f"nixl-{role}.log").open("wb"))
            with contextlib.nullcontext() if end is None else end.entered():
                server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            servers.append(server)
            stack.callback(_kill, server)
            clients.append(httpx.Client(base_url=f"http://{host}:{port}", timeout=REQUEST_S))
            stack.callback(clients[-1].close)
        for client in clients:
            _await(client)
        for server in servers:
            for pid in session(server.pid):
                os.sched_setaffinity(pid, processors)
        yield Nixl(model, *clients)


def _kill(server: subprocess.Popen[bytes]) -> None:
    left = shared_memory(server.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    for file in left:
        file.unlink(missing_ok=True)


def _await(client: httpx.Client) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit("a vLLM server was not ready in time; its log is beside the others")


# ---- both


def measure(system: Ours | Nixl, ids: Sequence[int], lengths: Sequence[int], repeats: int) -> None:
    """Print one line for each length. Every prompt begins differently, so that nothing is found in a cache."""
    for warm in range(2):
        system.split(ids[7 + warm : 307 + warm])
        system.local(ids[17 + warm : 317 + warm])
    for at, length in enumerate(lengths):
        local, split = [], []
        start = 20 + 60 * at
        while len(split) < repeats:
            start += 3
            with contextlib.suppress(TookAnotherWay):
                split.append(system.split(ids[start : start + length]))
                local.append(system.local(ids[start + 1 : start + 1 + length]))
        figures = {
            "ttft_s": statistics.median(each.ttft for each in split),
            "tail_s": statistics.median(each.tail for each in split),
            "local_s": statistics.median(local),
        }
        line = {"system": system.name, "tokens": length} | {name: round(value, 3) for name, value in figures.items()}
        print(json.dumps(line), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure one system after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--nixl", type=Path, help="leave it out to measure only this project")
    parser.add_argument("--lengths", type=int, nargs="+", default=[513, 2000, 3000, 8000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wan", action="store_true", help="needs network namespaces and TUN devices")
    parser.add_argument("--only", choices=["prfaas", "nixl"])
    said = parser.parse_args(arguments)
    ids = Tokenizer.from_file(str(said.model / "tokenizer.json")).encode(long_prompt(max(said.lengths) + 400)).ids
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        logs = Path(directory)
        wan = stack.enter_context(wide_area()) if said.wan else None
        if said.only != "nixl":
            with ours(said.model, said.vllm, logs, wan) as system:
                measure(system, ids, said.lengths, said.repeats)
        if said.only != "prfaas" and said.nixl is not None:
            with nixl(said.model, said.vllm, said.nixl, logs, wan) as other:
                measure(other, ids, said.lengths, said.repeats)


if __name__ == "__main__":
    main(sys.argv[1:])
