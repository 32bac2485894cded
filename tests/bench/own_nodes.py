"""What a request to our own nodes costs the gateway: tokenised, split over two clusters, answered whole and streamed.

    python -m tests.bench.own_nodes [--rounds 3] [--streams 100] [--rate 20] [--profile FILE] [--json]

The gateway is a process of its own; another one, of a prefill node and a decode node that compute nothing, speaks the
real control stream to it. Prompts have 200 words, each another one, so that none is cached: all are prefilled in the
other cluster. Processor time is the kernel's account of the gateway alone. A stream's last event, which says why it
ended, counts among its chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tokenizers
import uvloop

from gateway.model import load_model
from kvcache.control import (
    Delta,
    Finished,
    GenerateJob,
    ModelInfo,
    PrefillDone,
    PrefillJob,
    PrefillStarted,
    TransferDone,
)
from kvcache.layout import DType
from kvcache.ticket import verify_ticket
from kvcache.wire import Role
from node.bench.relay import load, process
from node.bench.relay.load import Target
from tests.gateway.fakes import FakeNode
from tests.gateway.model_files import write_shell

MODEL = "mock"
CLUSTER = "east"
CONTEXT = 4096
WORDS = 200
WARM_UP = 200
FEW = 8
"""An answer of fewer tokens is said at once, not at the rate of streams."""
PATIENCE_S = 120.0
READY_S = 30.0
_GATEWAY = "from gateway.cli import main; main()"
_PROFILED = """
import cProfile, time
from gateway.cli import main
profile = cProfile.Profile(time.thread_time)
try:
    profile.runcall(main)
finally:
    profile.dump_stats({path!r})
"""


@dataclass(frozen=True)
class Setting:
    """How much, how often, and where a profile goes, if one is wanted."""

    rounds: int
    requests: int
    streams: int
    chunks: int
    rate: float
    profile: Path | None


async def main(setting: Setting) -> dict[str, Any]:
    """The figures: of each the median of the rounds. Raises RuntimeError where anything was lost or not split."""
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as found:
        directory = Path(found)
        write_model(directory)
        async with _gateway(directory, setting.profile) as target, _nodes(directory, target, setting.rate):
            await load.requests(target, WARM_UP, WORDS, PATIENCE_S, at_once=1, distinct=True)
            before = await _decided(target)
            rounds = [await _round(target, setting) for _ in range(setting.rounds)]
            after = await _decided(target)
    remote, all_ways = (after[at] - before[at] for at in (0, 1))
    if remote < 0.95 * all_ways:
        raise RuntimeError(f"only {remote} of {all_ways} requests were split")
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


async def _round(target: Target, setting: Setting) -> dict[str, float]:
    short = await load.requests(target, setting.requests, WORDS, PATIENCE_S, distinct=True)
    streamed = await load.streams(target, setting.streams, setting.chunks, PATIENCE_S, distinct=True)
    if short.lost or streamed.lost or streamed.truncated:
        raise RuntimeError(f"lost {short.lost} requests, {streamed.lost} streams; cut {streamed.truncated}")
    request_us = 1e6 * short.cpu_s / setting.requests
    return {
        "cpu_us_per_request": round(request_us, 1),
        "cpu_us_per_chunk": round(1e6 * streamed.cpu_s / streamed.chunks, 2),
        "cpu_us_per_chunk_less_requests": round(
            (1e6 * streamed.cpu_s - setting.streams * request_us) / streamed.chunks, 2
        ),
        "interchunk_p99_ms": round(streamed.gap_ms(0.99), 2),
        "ttfb_p99_ms": round(streamed.first_ms(0.99), 2),
        "requests_per_s": round(setting.requests / short.wall_s, 1),
    }


# ---- the gateway


def write_model(directory: Path) -> None:
    """A model that nobody computes with, whose tokeniser makes one token of a common word."""
    write_shell(directory, CONTEXT, 512)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    word = "Ġhello"
    merges = [(word[:end], word[end]) for end in range(1, len(word))]
    symbols = [*alphabet, *(left + right for left, right in merges)]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@asynccontextmanager
async def _gateway(directory: Path, profile: Path | None) -> AsyncIterator[Target]:
    key = f"prfaas-{secrets.token_urlsafe(32)}"
    key_file = directory / "key"
    key_file.write_text(key)
    key_file.chmod(0o600)
    options = [
        "--model",
        str(directory),
        "--model-name",
        MODEL,
        "--dtype",
        "float32",
        "--state",
        str(directory / "state.db"),
    ]
    options += ["--admin-key-file", str(key_file), "--threshold", "64", "--canary-interval", "0", "--port", "0"]
    code = _GATEWAY if profile is None else _PROFILED.format(path=str(profile))
    async with process.running((sys.executable, "-c", code, "gateway", *options), directory, "listening") as (
        pid,
        line,
    ):
        yield Target(int(line.rpartition(":")[2]), pid, MODEL, key)


def _client(target: Target) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{target.port}", headers={"authorization": f"Bearer {target.key}"}, timeout=READY_S
    )


@asynccontextmanager
async def _nodes(directory: Path, target: Target, rate: float) -> AsyncIterator[None]:
    """The process of the nodes, once the gateway is ready to split."""
    async with _client(target) as client:
        (await client.post("/v1/clusters", json={"name": CLUSTER})).raise_for_status()
    command = (sys.executable, "-m", "tests.bench.own_nodes", "--nodes", str(target.port), str(directory), str(rate))
    async with process.running(command, directory, "joined"):
        yield


async def _decided(target: Target) -> tuple[int, int]:
    """Decisions for the other cluster, and all."""
    async with _client(target) as client:
        text = (await client.get("/metrics")).raise_for_status().text
    counted = [line for line in text.splitlines() if line.startswith("prfaas_disagg_decision_total{")]
    numbers = [(int(float(line.rpartition(" ")[2])), 'decision_type="remote"' in line) for line in counted]
    return sum(number for number, remote in numbers if remote), sum(number for number, _ in numbers)


# ---- the nodes


async def be_nodes(port: int, directory: Path, rate: float) -> None:
    """Two nodes of two clusters, until the process is ended."""
    model = load_model(directory, MODEL, DType.FLOAT32)
    info = ModelInfo(MODEL, model.fingerprint.parts(), CONTEXT, 256, model.vocab_size)
    url = f"http://127.0.0.1:{port}"
    far = FakeNode(url, "far", Role.PREFILL, info, cluster=CLUSTER, max_queue=4096, speed=1e6)
    near = FakeNode(url, "near", Role.DECODE, info, max_queue=4096)
    far.on_prefill = _prefill
    near.on_generate = _Speaker(rate).answer
    for node in (far, near):
        await node.start()
        if node.refused is not None:
            raise RuntimeError(f"{node.name}: {node.refused}")
    print("joined", flush=True)
    while not (far.violations or near.violations):
        await asyncio.sleep(1)
        for node in (far, near):
            node.orders.clear()
    raise RuntimeError(f"{far.violations[:3]} {near.violations[:3]}")


async def _prefill(node: FakeNode, job: PrefillJob) -> None:
    transfer = _ticket(node, job.ticket).transfer
    await node.send(PrefillStarted(transfer))
    await node.send(PrefillDone(transfer, 1e-4, len(job.token_ids) - 1))


class _Speaker:
    """Says a word ``rate`` times a second to whoever asked for many, and few words at once."""

    def __init__(self, rate: float) -> None:
        self._pause_s = 1 / rate

    async def answer(self, node: FakeNode, job: GenerateJob) -> None:
        if job.source is not None:
            ticket = _ticket(node, job.source.ticket)
            sizes = (ticket.byte_cap, ticket.byte_cap)
            await node.send(TransferDone(ticket.transfer, *sizes, "lossless", 1e-3, 1e-4, bytes(16)))
        said = job.sampling.max_tokens - 1
        word = Delta(job.generation, " word", (7,))
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(said):
            await node.send(word)
            if said > FEW:
                due += self._pause_s
                await asyncio.sleep(due - loop.time())
        await node.send(Finished(job.generation, "stop", len(job.token_ids), said, 0))


def _ticket(node: FakeNode, data: bytes) -> Any:
    assert node.welcome is not None
    return verify_ticket(data, node.welcome.ticket_key, time.time())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--nodes"]:
        port, directory, rate = sys.argv[2:]
        asyncio.run(be_nodes(int(port), Path(directory), float(rate)))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="chunks a second of each stream")
    parser.add_argument("--profile", type=Path, help="where cProfile's figures of the gateway go")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    wanted = Setting(given.rounds, given.requests, given.streams, given.chunks, given.rate, given.profile)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(main(wanted))
    if given.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:>32} {value:10.2f}")
