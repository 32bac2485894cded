"""A thousand relayed streams, and gateways that are replaced behind their port: what becomes of them.

    python -m tests.bench.rolling_relay [--streams 1000] [--rate 10] [--seconds 60] [--turns 2] [--json]

Real processes: an engine that computes nothing and speaks ``--rate`` chunks a second into each stream, and gateways
that take over from each other by ``--handover``, with keys, admission and metrics on. All streams are opened at once;
after ``--seconds`` a new gateway takes over, ``--turns`` times, ``AFTER_S`` apart, and the streams go on for so long
after the last one. Short requests come all the while, each on a connection of its own, and over one that is kept.

No stream may be lost or cut short, no request refused, and every gateway that was replaced must end by itself. The exit
status is 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from node.bench.relay import load, process
from node.bench.relay.load import Target

AFTER_S = 10.0
PATIENCE_S = 300.0
OPTIONS = ("--drain-timeout", str(PATIENCE_S), "--request-timeout", str(PATIENCE_S))


@dataclass(slots=True)
class Short:
    """Requests beside the streams."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    stopping: bool = False
    pause_s: float = 0.1

    async def anew(self, target: Target) -> None:
        """Each on a connection of its own, until stopped."""
        while not self.stopping:
            found = await load.requests(target, 1, 20, PATIENCE_S)
            self._count("" if not found.lost else f"{time.strftime('%X')} a new connection", found.wall_s)
            await asyncio.sleep(self.pause_s)

    async def kept(self, target: Target) -> None:
        """Over a connection that is kept until the gateway says that it closes it."""
        body = json.dumps({"model": target.model, "prompt": "hello", "max_tokens": 5})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {target.key}\r\n"
        asked = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        while not self.stopping:
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            closes = False
            while not closes and not self.stopping:
                began = time.monotonic()
                try:
                    status, closes = await _exchange(reader, writer, asked)
                    self._count("" if status == 200 else f"status {status}", time.monotonic() - began)
                except (OSError, asyncio.IncompleteReadError) as error:
                    self._count(f"{time.strftime('%X')} a kept connection: {type(error).__name__}", 0.0)
                    break
                await asyncio.sleep(self.pause_s)
            writer.close()

    def _count(self, lost: str, seconds: float) -> None:
        if lost:
            self.lost.append(lost)
        else:
            self.answered += 1
            self.slowest_s = max(self.slowest_s, seconds)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytes) -> tuple[int, bool]:
    """The answer's status, and whether the connection ends with it."""
    writer.write(asked)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in head[1:] if line)
    await reader.readexactly(int(fields["content-length"]))
    return int(head[0].split()[1]), fields.get("connection") == "close"


async def measure(streams: int, rate: float, seconds: float, turns: int, folder: Path) -> dict[str, Any]:
    """Open the streams, replace the gateway, see all to its end."""
    chunks, port_file = int(rate * (seconds + turns * AFTER_S + AFTER_S)), str(folder / "port")
    options = ("--handover", port_file, *OPTIONS)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(process.engine(folder, rate))
        target = await stack.enter_async_context(process.gateway(folder, engine, options))
        files = ("--state", folder / "state.db", "--engines", folder / "engines.toml")
        again = ("gateway", "--port", target.port, *files, *options)
        command = (sys.executable, "-c", "from gateway.cli import main; main()", *map(str, again))

        short, pids, takeovers, cpu, still_open = Short(), [target.pid], [], [], False
        tasks = [asyncio.create_task(short.anew(target)), asyncio.create_task(short.kept(target))]
        opened = asyncio.create_task(load.streams(target, streams, chunks, chunks / rate + PATIENCE_S))
        began, spent = time.monotonic(), load.cpu_seconds(target.pid)
        await asyncio.sleep(seconds)
        cpu.append(round((load.cpu_seconds(target.pid) - spent) / (time.monotonic() - began), 3))
        for _ in range(turns):
            at = time.monotonic()
            pid, _ = await stack.enter_async_context(process.running(command, folder, "listening"))
            takeovers.append(round(time.monotonic() - at, 2))
            pids.append(pid)
            still_open = not opened.done()
            await asyncio.sleep(AFTER_S)
        seen = await opened
        short.stopping = True
        await asyncio.gather(*tasks)
        ended = [await _ended(pid) for pid in pids[:-1]]
    return {
        "streams": len(seen.answers),
        "chunks": seen.chunks,
        "lost_streams": seen.lost,
        "truncated_streams": seen.truncated,
        "open_after_the_last_takeover": still_open,
        "first_byte_p99_ms": round(seen.first_ms(0.99), 1),
        "interchunk_p99_ms": round(seen.gap_ms(0.99), 1),
        "interchunk_most_ms": round(seen.gap_ms(1.0), 1),
        "gateway_cpu": cpu[0],
        "short_requests": short.answered,
        "short_lost": short.lost,
        "slowest_short_s": round(short.slowest_s, 2),
        "takeover_s": takeovers,
        "replaced_gateways_ended": all(ended),
    }


async def _ended(pid: int) -> bool:
    """Whether a gateway that was replaced ends by itself soon after its last answer."""
    for _ in range(200):
        if not os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC240 (nothing waits for a disk there)
            return True
        await asyncio.sleep(0.1)
    return False


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=10.0, help="chunks a second of each stream")
    parser.add_argument("--seconds", type=float, default=60.0, help="before the first gateway is replaced")
    parser.add_argument("--turns", type=int, default=2, help="how often the gateway is replaced")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        wanted = (options.streams, options.rate, options.seconds, options.turns)
        figures = runner.run(measure(*wanted, Path(folder)))
    print(json.dumps(figures, indent=1) if options.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))
    lost = figures["lost_streams"] or figures["truncated_streams"] or figures["short_lost"]
    return 1 if lost or not figures["open_after_the_last_takeover"] or not figures["replaced_gateways_ended"] else 0


if __name__ == "__main__":
    sys.exit(main())
