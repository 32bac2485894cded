"""What receiving KV does to the decodes that run beside it: time per output token, idle and during a receive.

    python -m tests.bench.interference MODEL_DIR [--gbps 1] [--decodes 2] [--transfers 30] [--core 0] [--json]

A decode node speaks ``decodes`` streams, its engine alone on ``--core``; gateway, both node processes, the clients and
the rest share the other cores. A prefill node that computes nothing sends one cache after the other over the loopback,
at the rate that its cluster is leased, with a pause of the same length after each. The gaps between tokens are the
clients'; those that lie within a transfer (from its grant to its commit) are compared with those in the pauses.
Loading a committed cache and its first token is the engine's own work and in neither. The exit status is 1 where p50
is above 1.05 times idle or p99 above 1.25 times.

``robbed`` is the share of time in which the engine could have run and others had its core: where it is more than a
percent or two, the machine is not quiet enough for these figures to mean anything.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from rich.console import Console

from deploy.progress import Progress
from deploy.stack import Process, Stack, StackSpec
from tests.stacks import RunningStack, node, some_ids

P50_RATIO, P99_RATIO = 1.05, 1.25
SPOKEN_PROMPT, SPOKEN_TOKENS = 64, 8000
PROMPT = 30_000
SETTLE_S = 0.3
"""After a transfer its cache is loaded and one token spoken; until then a gap is not idle."""


class Span(NamedTuple):
    """From and to, by the monotonic clock."""

    start: float
    stop: float


class OneWayStack(Stack):
    """Its prefill node computes nothing, and its cluster may send at ``gbps``."""

    def __init__(self, spec: StackSpec, gbps: float) -> None:
        super().__init__(spec, Progress(Console(file=io.StringIO())))
        self._gbps = gbps

    def start_process(self, name: str, command: str, arguments: Sequence[str]) -> Process:
        """As everywhere, but for the prefill node's command."""
        replaced = {"gateway": "tests.bench.one_codec:raw", "prefill": "tests.bench.replay_node:command"}
        return super().start_process(name, replaced.get(name, command), arguments)

    def start_gateway(self) -> None:
        """Start it, with the remote cluster registered."""
        super().start_gateway()
        body = {"name": "east", "dial": "in", "egress_gbps": self._gbps}
        httpx.post(f"{self.url}/v1/clusters", json=body, timeout=10).raise_for_status()


def speak(stack: RunningStack, seed: int, times: list[float], over: threading.Event) -> None:
    """Read one stream until ``over``, noting when each token comes."""
    body = stack.body(some_ids(SPOKEN_PROMPT, seed=seed), SPOKEN_TOKENS, stream=True)
    headers = {"x-prfaas-route-hint": "local"}
    with httpx.stream("POST", f"{stack.stack.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
            if over.is_set():
                return


def pin(pid: int, core: int) -> None:
    """Every thread of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def robbed_s(pid: int) -> float:
    """Seconds that the threads of a process have waited for a core so far."""
    waits = [(task / "schedstat").read_text().split()[1] for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(map(int, waits)) / 1e9


def receive(stack: RunningStack, seed: int) -> tuple[Span, dict[str, Any]]:
    """Let the decode node fetch one cache; when it was under way (or rather less), and its record."""
    began = time.monotonic()
    answer = stack.complete(some_ids(PROMPT, seed=seed), 1)
    assert answer.status_code == 200, answer.text
    record = stack.record(answer)
    [attempt] = record["attempts"]
    granted = began + record["ttft_s"] - attempt["transfer_s"]
    return Span(granted, began + attempt["transfer_s"]), attempt


def gaps(streams: Sequence[Sequence[float]], spans: Sequence[Span]) -> np.ndarray:
    """Seconds between tokens of a stream, of those pairs that lie within one of the spans."""
    found = []
    for times in streams:
        for one, other in pairwise(times):
            if any(span.start <= one and other <= span.stop for span in spans):
                found.append(other - one)
    return np.array(found)


def measure(options: argparse.Namespace, say: Console) -> dict[str, Any]:
    """Speak, and receive now and then."""
    others = os.sched_getaffinity(0) - {options.core}
    if not others:
        raise SystemExit("prfaas: two cores are needed, one of them for the engine alone")
    os.sched_setaffinity(0, others)
    busy: list[Span] = []
    idle: list[Span] = []
    gbps: list[float] = []
    robbed: list[list[float]] = [[], []]
    over = threading.Event()
    streams: list[list[float]] = [[] for _ in range(options.decodes)]
    nodes = (node("prefill", "east", "prefill"), node("decode", "local", "decode"))
    with ExitStack() as held:
        logs = Path(held.enter_context(tempfile.TemporaryDirectory()))
        spec = StackSpec(options.model_dir, options.model_dir.name, logs, pool_mib=512, nodes=nodes)
        stack = RunningStack(held.enter_context(OneWayStack(spec, options.gbps)))
        held.callback(stack.http.close)
        engine = stack.engine_pid("decode")
        pin(engine, options.core)
        readers = [
            threading.Thread(target=speak, args=(stack, n, times, over), daemon=True) for n, times in enumerate(streams)
        ]
        for reader in readers:
            reader.start()
        receive(stack, 0)
        for turn in range(options.transfers):
            before, began = robbed_s(engine), time.monotonic()
            span, attempt = receive(stack, turn + 1)
            robbed[1].append((robbed_s(engine) - before) / (time.monotonic() - began))
            time.sleep(SETTLE_S)
            before, start = robbed_s(engine), time.monotonic()
            time.sleep(attempt["transfer_s"])
            robbed[0].append((robbed_s(engine) - before) / (time.monotonic() - start))
            busy.append(span)
            idle.append(Span(start, time.monotonic()))
            gbps.append(attempt["wire_bytes"] * 8 / attempt["transfer_s"] / 1e9)
            say.print(f"transfer {turn + 1} of {options.transfers}: {gbps[-1]:.2f} Gbit/s")
        over.set()
        for reader in readers:
            reader.join(10)
    quiet, loud = gaps(streams, idle), gaps(streams, busy)
    return figures(quiet, loud) | {
        "gbps": float(np.median(gbps)),
        "gaps_idle": len(quiet),
        "gaps_receiving": len(loud),
        "robbed_idle": float(np.mean(robbed[0])),
        "robbed_receiving": float(np.mean(robbed[1])),
    }


def figures(quiet: np.ndarray, loud: np.ndarray) -> dict[str, Any]:
    """Quantiles in ms, their ratios, and whether these hold."""
    row: dict[str, Any] = {}
    for name, share in (("p50", 50), ("p99", 99)):
        one, other = float(np.percentile(quiet, share)), float(np.percentile(loud, share))
        row |= {f"{name}_idle_ms": one * 1e3, f"{name}_receiving_ms": other * 1e3, f"{name}_ratio": other / one}
    return row | {"holds": row["p50_ratio"] <= P50_RATIO and row["p99_ratio"] <= P99_RATIO}


def main() -> None:
    """Measure; the exit status says whether both ratios hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--decodes", type=int, default=2)
    parser.add_argument("--transfers", type=int, default=30)
    parser.add_argument("--core", type=int, default=0, help="the engine's; the others are the rest's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options, Console(stderr=True))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:20} {value:.3f}" if isinstance(value, float) else f"{name:20} {value}")
    sys.exit(0 if found["holds"] else 1)


if __name__ == "__main__":
    main()
