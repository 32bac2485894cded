"""Workers of one port that are ended and followed in turn: what becomes of streams and requests.

    python -m tests.bench.rolling_workers [--workers 2] [--turns 10] [--streams 100] [--linger 2] [--json]

Real processes: ``prfaas gateway --workers`` over a real Redis before an engine that computes nothing. Each turn ends
the oldest worker with SIGTERM, and waits until another has taken its place. Meanwhile ``--streams`` streams of 5 s
are open, begun anew whenever one has ended, and short requests come as fast as they are answered: 12 clients with a
connection for each, and 8 that keep theirs. The exit status is 1 where a stream is lost or cut short or a request is
not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from node.bench.relay import load, process
from node.bench.relay.load import Target
from tests.bench.rolling_relay import Short
from tests.redis_server import REDIS, running_redis

RATE = 10.0
CHUNKS = 50
FRESH, KEPT = 12, 8
PATIENCE_S = 60.0
BETWEEN_S = 1.5


class Streams:
    """So many at once, until stopped."""

    def __init__(self) -> None:
        self.whole = self.lost = self.truncated = 0

    async def run(self, target: Target, short: Short) -> None:
        """One after the other."""
        while not short.stopping:
            seen = await load.streams(target, 1, CHUNKS, PATIENCE_S)
            self.lost += seen.lost
            self.truncated += seen.truncated
            self.whole += 1 - seen.lost - seen.truncated


async def measure(workers: int, turns: int, count: int, linger: float, folder: Path) -> dict[str, Any]:
    """End them in turn; see all to its end."""
    options = ("--workers", str(workers), "--linger", str(linger), "--drain-timeout", str(PATIENCE_S))
    with running_redis() as redis:
        async with (
            process.engine(folder, RATE) as engine,
            process.gateway(folder, engine, (*options, "--redis", redis.url)) as target,
        ):
            short, streams, replaced = Short(pause_s=0.01), Streams(), []
            tasks = [asyncio.create_task(short.anew(target)) for _ in range(FRESH)]
            tasks += [asyncio.create_task(short.kept(target)) for _ in range(KEPT)]
            tasks += [asyncio.create_task(streams.run(target, short)) for _ in range(count)]
            await asyncio.sleep(BETWEEN_S)
            for _ in range(turns):
                began = time.monotonic()
                os.kill(min(_children(target.pid)), signal.SIGTERM)
                await _followed(target.pid, workers)
                replaced.append(round(time.monotonic() - began, 1))
                await asyncio.sleep(BETWEEN_S)
            short.stopping = True
            await asyncio.gather(*tasks)
    return {
        "streams": streams.whole,
        "lost_streams": streams.lost,
        "truncated_streams": streams.truncated,
        "short_requests": short.answered,
        "short_lost": short.lost,
        "slowest_short_s": round(short.slowest_s, 2),
        "replaced_after_s": replaced,
    }


async def _followed(parent: int, workers: int) -> None:
    """Return when the oldest is gone and all places are taken. Raises TimeoutError."""
    before = min(_children(parent))
    async with asyncio.timeout(PATIENCE_S):
        while before in (now := _children(parent)) or len(now) < workers:  # noqa: ASYNC110 (another's processes)
            await asyncio.sleep(0.05)


def _children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in task.read_text().split()]


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--linger", type=float, default=2.0, help="as of the gateway")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if REDIS is None:
        print("redis-server is not installed", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        wanted = (options.workers, options.turns, options.streams, options.linger)
        figures = runner.run(measure(*wanted, Path(folder)))
    print(json.dumps(figures, indent=1) if options.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))
    return 1 if figures["lost_streams"] or figures["truncated_streams"] or figures["short_lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
