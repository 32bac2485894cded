"""256 MiB between two processes of this machine by each transport: ``python -m tests.bench.transports --help``.

Tickets, digests and all: the code that serves, with a recording in a model's place. Rounds of all transports take
turns, so that what slows the machine slows all of them. Processor time of both processes is printed beside: it is
steadier.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.transport_pair import TransportPair, transport_pair


@dataclass(frozen=True)
class Round:
    """One transfer: seconds from asking to the commit, processor seconds of both sides."""

    seconds: float
    fetching_s: float
    serving_s: float
    verified: bool


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process that live, in nanoseconds' steps."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def once(pair: TransportPair, transport: str) -> Round:
    began = cpu_s(pair.pid)
    done = await pair.fetch(transport)
    await asyncio.sleep(0.01)  # the server hears of the commit
    return Round(done.seconds, done.cpu_s, cpu_s(pair.pid) - began, done.verified)


async def run(transports: Sequence[str], nbytes: int, rounds: int) -> list[dict[str, object]]:
    """Every transport ``rounds`` times, in turn; figures by transport, the first one's as the measure."""
    async with transport_pair(transports, nbytes) as pair:
        found: dict[str, list[Round]] = {transport: [] for transport in transports}
        for _ in range(rounds):
            for transport in transports:
                found[transport].append(await once(pair, transport))
        nbytes = pair.nbytes
    rows = []
    for transport, each in found.items():
        seconds = statistics.median(one.seconds for one in each)
        processor = statistics.median(one.fetching_s + one.serving_s for one in each)
        rows.append(
            {
                "transport": transport,
                "bytes": nbytes,
                "median_s": seconds,
                "best_s": min(one.seconds for one in each),
                "gb_per_s": nbytes / seconds / 1e9,
                "best_gb_per_s": nbytes / min(one.seconds for one in each) / 1e9,
                "fetching_cpu_s": statistics.median(one.fetching_s for one in each),
                "serving_cpu_s": statistics.median(one.serving_s for one in each),
                "cpu_s": processor,
                "verified": all(one.verified for one in each),
            }
        )
    for row in rows:
        for figure in ("median_s", "best_s", "cpu_s"):
            row[f"{figure}_ratio"] = rows[0][figure] / row[figure]  # type: ignore[operator]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", action="append", choices=("tcp", "shm", "nixl"), help="default: tcp and shm")
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(run(options.transport or ("tcp", "shm"), options.bytes, options.rounds))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['transport']:>5}: {row['gb_per_s']:.2f} GB/s (best {row['best_gb_per_s']:.2f}), processor "
            f"{row['fetching_cpu_s']:.3f} + {row['serving_cpu_s']:.3f} s; {rows[0]['transport']} takes "
            f"{row['median_s_ratio']:.2f} x the time (best {row['best_s_ratio']:.2f}), {row['cpu_s_ratio']:.2f} x the "
            f"processor; {'verified' if row['verified'] else 'NOT what was offered'}"
        )


if __name__ == "__main__":
    main()
