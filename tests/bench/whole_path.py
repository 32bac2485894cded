"""Time to first token, transfer sizes and the exposed tail on a running stack, local beside remote.

    python -m tests.bench.whole_path MODEL_DIR [--dtype bfloat16] [--lengths 512,2048,8192] [--repeats 3] [--json]

Each length is asked for by both ways in turn, ``repeats`` times, one request at a time; the medians are printed. The
ids are random, so nothing is cached anywhere. Figures come from the decision records, that is, from the gateway's clock
(time to first token) and the decode node's (exposed: last chunk computed to committed).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.stacks import RunningStack, running_stack, some_ids

WAYS = ("local", "remote")
TOKENS = 8


def measure(stack: RunningStack, length: int, way: str, seed: int) -> dict[str, float]:
    """One request's figures. Raises AssertionError where it did not take the way asked for."""
    answer = stack.complete(some_ids(length, vocab=200_000, seed=seed), TOKENS, hint=way)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prfaas-route"].startswith(way), answer.headers
    record = stack.record(answer)
    attempt = record["attempts"][0]
    return {
        "ttft_s": record["ttft_s"],
        "raw_bytes": attempt["raw_bytes"],
        "wire_bytes": attempt["wire_bytes"],
        "exposed_s": attempt["exposed_s"],
        "prefill_s": attempt["prefill_s"],
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def show(rows: list[dict[str, Any]]) -> None:
    """A table for people."""
    table = Table("tokens", "way", "TTFT s", "prefill s", "exposed ms", "KV MiB", "wire MiB", title="Medians")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            row["way"],
            f"{row['ttft_s']:.3f}",
            f"{row['prefill_s']:.3f}",
            f"{row['exposed_s'] * 1e3:.1f}",
            f"{row['raw_bytes'] / 2**20:.2f}",
            f"{row['wire_bytes'] / 2**20:.2f}",
        )
    Console().print(table)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--lengths", default="512,2048,8192", help="prompt tokens, comma separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lengths = [int(part) for part in arguments.lengths.split(",")]
    progress = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        running_stack(arguments.model_dir, Path(logs), dtype=arguments.dtype, pool_mib=512) as stack,
    ):
        for way in WAYS:
            measure(stack, 300, way, seed=0)
        for length in lengths:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for repeat in range(arguments.repeats):
                for way in WAYS:
                    progress.print(f"{length} tokens, {way}, run {repeat + 1} of {arguments.repeats}")
                    runs[way].append(measure(stack, length, way, seed=repeat + 1))
            rows += [{"tokens": length, "way": way, **medians(runs[way])} for way in WAYS]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
