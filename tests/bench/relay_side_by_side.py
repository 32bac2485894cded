"""The gateway beside other routers, in front of the same engine that computes nothing, in one run.

``python -m tests.bench.relay_side_by_side --routers VENV`` with vllm-router and sglang-router in that venv. Each is
loaded in turn, several times, because what else the machine does changes: of every figure the median of its rounds
counts. The gateway has keys, admission and metrics on, as has what it is compared with by default. It has one thread
for all requests, and the routers one for each core: with ``--workers N`` it runs as so many processes, over a Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from node.bench.relay import load, process
from node.bench.relay.load import Target
from tests.redis_server import running_redis

LONG_WORDS = 60_000
LONG_REQUESTS = 60
READY_S = 60.0
GATEWAY = "prfaas gateway"


@dataclass(frozen=True)
class Setting:
    """How much, and how often."""

    rounds: int
    streams: int
    chunks: int
    rate: float
    requests: int
    workers: int


async def main(routers: Path, setting: Setting) -> None:
    """Print each figure of each, and the gateway's over the best of the others."""
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as found:
        directory = Path(found)
        async with AsyncExitStack() as stack:
            port = await stack.enter_async_context(process.engine(directory, setting.rate))
            options = _workers(stack, setting.workers)
            targets = {GATEWAY: await stack.enter_async_context(process.gateway(directory, port, options))}
            for name in ("sglang-router", "vllm-router"):
                targets[name] = await _router(stack, routers, name, port, directory)
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
            for number in range(setting.rounds):
                for name, target in targets.items():
                    rounds[name].append(await _round(target, setting))
                    print(f"round {number + 1} {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    print(json.dumps(_summary(rounds), indent=2))


async def _round(target: Target, setting: Setting) -> dict[str, float]:
    """The figures of one target, once. Raises RuntimeError where it lost anything."""
    await load.requests(target, 50, 200, 60.0)
    streamed = await load.streams(target, setting.streams, setting.chunks, 120.0)
    short = await load.requests(target, setting.requests, 200, 60.0)
    long = await load.requests(target, LONG_REQUESTS, LONG_WORDS, 120.0, at_once=4)
    if streamed.lost or streamed.truncated or short.lost or long.lost:
        raise RuntimeError(f"lost {streamed.lost}, cut {streamed.truncated} streams, {short.lost + long.lost} requests")
    return {
        "cpu_us_per_chunk": round(1e6 * streamed.cpu_s / streamed.chunks, 2),
        "interchunk_p99_ms": round(streamed.gap_ms(0.99), 2),
        "ttfb_p99_ms": round(streamed.first_ms(0.99), 2),
        "cpu_us_per_request": round(1e6 * short.cpu_s / setting.requests, 1),
        "cpu_us_per_long_request": round(1e6 * long.cpu_s / LONG_REQUESTS, 1),
    }


def _summary(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    medians = {
        name: {figure: statistics.median(one[figure] for one in found) for figure in found[0]}
        for name, found in rounds.items()
    }
    best = {
        figure: min(found[figure] for name, found in medians.items() if name != GATEWAY) for figure in medians[GATEWAY]
    }
    ratios = {figure: round(value / best[figure], 2) for figure, value in medians[GATEWAY].items()}
    return {"medians": medians, "gateway_over_best_of_others": ratios}


def _workers(stack: AsyncExitStack, count: int) -> tuple[str, ...]:
    """What the gateway is told to be that many processes."""
    if count == 1:
        return ()
    return "--workers", str(count), "--redis", stack.enter_context(running_redis()).url


async def _router(stack: AsyncExitStack, venv: Path, name: str, engine: int, directory: Path) -> Target:
    port, metrics = _free_port(), _free_port()
    command = [str(venv / "bin" / name)]
    if name == "sglang-router":
        command.append("launch")
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{engine}"]
    command += ["--policy", "round_robin", "--prometheus-port", str(metrics)]
    command += ["--log-level", "warn" if name == "sglang-router" else "warning"]
    log = stack.enter_context((directory / f"{name}.log").open("wb"))
    running = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, cwd=directory)

    async def end() -> None:
        if running.returncode is None:
            running.kill()
        await running.wait()

    stack.push_async_callback(end)
    target = Target(port, running.pid, process.MODEL)
    async with asyncio.timeout(READY_S):
        while True:
            answers = await load.requests(target, 1, 5, 2.0)
            if not answers.lost:
                return target
            if running.returncode is not None:
                raise RuntimeError(f"{name} ended: {(directory / f'{name}.log').read_text()[-2000:]}")
            await asyncio.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=Path, required=True, help="venv with vllm-router and sglang-router")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=1, help="processes of the gateway; for 2, redis-server")
    given = parser.parse_args()
    wanted = Setting(given.rounds, given.streams, given.chunks, given.rate, given.requests, given.workers)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(given.routers, wanted))
