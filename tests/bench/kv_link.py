"""What else a link must give: a small transfer at once, and no transfer held up by a receiver that has stopped.

    python -m tests.bench.kv_link {small|stopped} [--model DIR] [--rounds 3]

``small``: 1 MiB over a warm link of 1 Gbps and 30 ms, in seconds and round trips, beside its serialisation time.
``stopped``: the speed of one transfer over that link, alone and beside another whose receiver was stopped half-way.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import time
from pathlib import Path

from tests.bench.kv_processes import kv_serving
from tests.wan.direction import LinkSettings
from tests.wan.link import Wan, wide_area

LINK = LinkSettings(rate_bps=1e9, delay_s=0.015)
SMALL, LARGE = 1 << 20, 256 << 20
TURNS = 15
AT_WORK_S = 3.0


def small(wan: Wan, options: argparse.Namespace) -> None:
    """Print medians of a few fetches, round after round."""
    rtt_s = 2 * LINK.delay_s
    with kv_serving(wan.near, SMALL, options.model) as serving:
        for _ in range(options.rounds):
            found = serving.fetch(wan.far, "raw", "--repeats", str(TURNS))
            line_s = found["bytes_wire"] * 8 / LINK.rate_bps
            for name in ("seconds", "granted_s"):
                trips = (found[name] - line_s) / rtt_s
                print(
                    f"{name} {found[name] * 1e3:.1f} ms = {line_s * 1e3:.1f} ms on the line + {trips:.2f} round trips"
                )


def stopped(wan: Wan, options: argparse.Namespace) -> None:
    """Print Gbit/s alone and beside a stopped receiver."""
    alone, beside = [], []
    for _ in range(options.rounds):
        with kv_serving(wan.near, LARGE, options.model) as serving:
            alone.append(serving.fetch(wan.far, "raw")["goodput_gbps"])
            other = serving.start_fetch(wan.far, "raw", "--repeats", "1000", stderr=subprocess.DEVNULL)
            try:
                time.sleep(AT_WORK_S)
                other.send_signal(signal.SIGSTOP)
                beside.append(serving.fetch(wan.far, "raw", "--repeats", "1")["goodput_gbps"])
            finally:
                other.kill()
                other.wait(10)
    one, two = statistics.median(alone), statistics.median(beside)
    print(f"alone {one:.3f} Gbit/s, beside a stopped receiver {two:.3f} Gbit/s: {two / one:.1%}")


def main() -> None:
    """Measure one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("small", "stopped"))
    parser.add_argument("--model", type=Path, help="capture the KV from this model; default: made-up KV")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with wide_area(LINK) as wan:
        {"small": small, "stopped": stopped}[options.what](wan, options)


if __name__ == "__main__":
    main()
