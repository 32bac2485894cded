"""How much of a transfer its computation hides, measured and modelled: ``python -m tests.bench.layer_pipeline --help``.

For each transport the transfer is timed alone, and then beside computations of several lengths in which layer after
layer becomes ready to leave. What the model of ``scheduler.topology.pipeline`` says of the same times is printed beside
it. The computation is an even pace, and takes no processor: that of an accelerator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scheduler.topology.pipeline import pipelined
from tests.bench.transport_pair import TransportPair, transport_pair

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
TOLERANCE = 0.10


@dataclass(frozen=True)
class Row:
    """One transport beside one computation: seconds, and shares of the transfer alone.

    ``recorded`` is what the gateway keeps of such a transfer, which knows nothing of the transfer alone.
    """

    transport: str
    compute_over_transfer: float
    alone_s: float
    compute_s: float
    exposed_s: float
    hidden: float
    modelled: float
    recorded: float

    @property
    def differs(self) -> float:
        return self.hidden - self.modelled


def undisturbed(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=4)[0]


async def measure(pair: TransportPair, transport: str, ratio: float, rounds: int) -> Row:
    """Alone and beside, in turn, so that what slows one slows both.

    Of each the lower quartile is taken: what disturbs a transfer only makes it longer.
    """
    alone = [(await pair.fetch(transport)).report.exposed_s for _ in range(3)]
    compute_s = ratio * undisturbed(alone)
    exposed, recorded = list[float](), list[float]()
    for _ in range(rounds):
        done = (await pair.fetch(transport, compute_s)).report
        exposed.append(done.exposed_s)
        recorded.append(1 - done.backlog_bytes / done.raw_bytes)
        alone.append((await pair.fetch(transport)).report.exposed_s)
    alone_s, exposed_s, layers = undisturbed(alone), undisturbed(exposed), pair.layers
    model = pipelined([compute_s / layers] * layers, [alone_s / layers] * layers)
    hidden = max(0.0, 1 - exposed_s / alone_s)
    return Row(transport, ratio, alone_s, compute_s, exposed_s, hidden, model.hidden, statistics.median(recorded))


async def run(transports: Sequence[str], nbytes: int, rounds: int) -> list[Row]:
    """Every transport beside every computation."""
    async with transport_pair(transports, nbytes) as pair:
        return [await measure(pair, transport, ratio, rounds) for transport in transports for ratio in RATIOS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", action="append", choices=("tcp", "shm", "nixl"), help="default: tcp and shm")
    parser.add_argument("--bytes", type=int, default=84_000_000, help="one chunk of a dense 70B model, 80 layers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(run(options.transport or ("tcp", "shm"), options.bytes, options.rounds))
    if options.json:
        print(json.dumps([asdict(row) | {"differs": row.differs} for row in rows], indent=2))
    else:
        print(f"{'by':>5} {'c/t':>5} {'alone ms':>9} {'exposed ms':>10} {'hidden':>7} {'model':>6} {'recorded':>8}")
        for row in rows:
            print(
                f"{row.transport:>5} {row.compute_over_transfer:5.2f} {row.alone_s * 1e3:9.1f} "
                f"{row.exposed_s * 1e3:10.1f} {row.hidden:7.0%} {row.modelled:6.0%} {row.recorded:8.0%}"
            )
    worst = max(rows, key=lambda row: abs(row.differs))
    print(f"furthest from the model: {worst.transport} at {worst.compute_over_transfer:g}: {worst.differs:+.1%}")
    raise SystemExit(abs(worst.differs) > TOLERANCE)


if __name__ == "__main__":
    main()
