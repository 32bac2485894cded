"""How long a transfer lays bare behind its prefill, next to the least that the link allows.

    python -m tests.bench.exposed_tail [--gemma DIR] [--tokens 2048] [--ratios 0.1 0.5 1 2] [--repeats 3] [--json]

A stack's remote prefill node sits behind a link of 30 ms whose rate makes the transfer take ``ratio`` times as long as
the prefill of a run before. Every run is held against the fluid bound of its own prefill time and bytes, as the
decision record has them: chunks are released as they are computed, windows and states with the last, and the link
drains what is there. Allowed are 1.05 times that, 1.5 round trips, and one layer's serialisation. The medians of
``repeats`` runs are printed; the exit status is 1 where one is over. Cases: ``--gemma`` (a real model) with raw and
with lossless KV, and a random-weight qwen3_next most of whose cache is states, with half as many tokens.

``seen`` is a check from the gateway's clock: first token less start and length of the prefill, so that a control
message, loading and one decode step are in it. ``dropped`` counts packets that found the link's queue full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcache.layout import DType
from kvcache.plan import TransferPlan, plan_transfer
from node.model import NodeModel
from tests.bench.release import largest_layer, releases, tail_s
from tests.models import tiny_model
from tests.stacks import RunningStack, some_ids
from tests.wan.direction import LinkSettings
from tests.wan.link import Wan, wide_area
from tests.wan.stack import wan_stack

RTT_S = 0.03
OPENING_BPS = 400e6
TRIES = 3
RATIOS = (0.1, 0.5, 1.0, 2.0)
QUEUE_RTTS = 2
STATES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""2 MiB of state for each of the three linear layers."""


@dataclass(frozen=True)
class Case:
    """A model, the length of its prompts, and the codec that all its transfers use."""

    name: str
    model: Path
    dtype: DType
    codec: str
    tokens: int


@dataclass(frozen=True)
class Run:
    """One request's figures; times in seconds."""

    prefill_s: float
    transfer_ratio: float
    bound_s: float
    allowed_s: float
    exposed_s: float
    seen_s: float
    wire_bytes: float
    mbps: float
    dropped: int


def ask(stack: RunningStack, tokens: int, seed: int) -> dict[str, Any]:
    """The record of a remote request's only attempt, with its time to first token.

    One that the gateway gave up as late, on a busy machine, is asked for again. Raises RuntimeError, AssertionError.
    """
    for _ in range(TRIES):
        answer = stack.complete(some_ids(tokens, seed=seed), 2)
        assert answer.status_code == 200, answer.text
        record = stack.record(answer)
        stack.await_idle()
        first, *others = record["attempts"]
        if not others:
            found: dict[str, Any] = {**first, "ttft_s": record["ttft_s"]}
            return found
    raise RuntimeError(f"no transfer of {TRIES} arrived: {first['stage']}, {first['cause']}")


def held_against_the_bound(plan: TransferPlan, attempt: dict[str, Any], bytes_per_s: float, dropped: int) -> Run:
    """One attempt's figures beside what was possible."""
    prefill_s, wire_ratio = attempt["prefill_s"], attempt["wire_bytes"] / attempt["raw_bytes"]
    bound = tail_s(releases(plan, prefill_s, wire_ratio), bytes_per_s)
    layer_s = largest_layer(plan) * wire_ratio / bytes_per_s
    return Run(
        prefill_s,
        attempt["wire_bytes"] / bytes_per_s / prefill_s,
        bound,
        1.05 * bound + 1.5 * RTT_S + layer_s,
        attempt["exposed_s"],
        attempt["ttft_s"] - attempt["prefill_started_after_s"] - prefill_s,
        attempt["wire_bytes"],
        bytes_per_s * 8 / 1e6,
        dropped,
    )


def measure(wan: Wan, case: Case, options: argparse.Namespace, say: Console) -> Iterator[dict[str, Any]]:
    """A row for each ratio."""
    layout = NodeModel.read(case.model, case.dtype).layout
    plan = plan_transfer(layout, 0, case.tokens - 1, 256)
    wan.change(LinkSettings(rate_bps=OPENING_BPS, delay_s=RTT_S / 2))
    with (
        tempfile.TemporaryDirectory() as logs,
        wan_stack(
            wan,
            case.model,
            Path(logs),
            gateway=f"tests.bench.one_codec:{case.codec}",
            dtype=str(case.dtype),
            pool_mib=256,
        ) as stack,
    ):
        stack.await_idle(60)
        last = [ask(stack, case.tokens, seed) for seed in (1, 2)][-1]
        for ratio in options.ratios:
            bytes_per_s = last["wire_bytes"] / (ratio * last["prefill_s"])
            queue_bytes = max(1 << 18, int(QUEUE_RTTS * RTT_S * bytes_per_s))
            wan.change(LinkSettings(rate_bps=bytes_per_s * 8, delay_s=RTT_S / 2, queue_bytes=queue_bytes))
            ask(stack, case.tokens, 3)
            runs = []
            for repeat in range(options.repeats):
                before = wan.counters()[0].overflowed
                last = ask(stack, case.tokens, 10 + repeat)
                dropped = wan.counters()[0].overflowed - before
                assert last["codec"] == case.codec, last
                runs.append(held_against_the_bound(plan, last, bytes_per_s, dropped))
                one = runs[-1]
                tail = f"exposed {one.exposed_s:.3f} s, allowed {one.allowed_s:.3f} s"
                say.print(f"{case.name}, {ratio}: {tail}, {dropped} packets dropped")
            median = {name: statistics.median(getattr(run, name) for run in runs) for name in asdict(runs[0])}
            over = statistics.median(run.exposed_s - run.allowed_s for run in runs)
            yield {"case": case.name, "ratio": ratio, **median, "over_s": over, "holds": over <= 0}


def show(rows: list[dict[str, Any]]) -> None:
    """A table for people."""
    columns = ("prefill_s", "transfer_ratio", "bound_s", "allowed_s", "exposed_s", "seen_s", "mbps", "dropped")
    table = Table("case", "ratio", *columns, "holds", title="Exposed tail, medians")
    for row in rows:
        figures = [f"{row[name]:.1f}" if name in ("mbps", "dropped") else f"{row[name]:.3f}" for name in columns]
        table.add_row(row["case"], f"{row['ratio']:g}", *figures, "yes" if row["holds"] else "NO")
    Console(width=140).print(table)


def main() -> None:
    """Measure every case; the exit status says whether all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", type=Path, metavar="DIR", help="a model directory; left out: only qwen3_next")
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), help="transfer/prefill, ascending")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    say = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, wide_area() as wan:
        cases = [
            Case(f"gemma {codec}", options.gemma, DType.BFLOAT16, codec, options.tokens)
            for codec in ("raw", "lossless")
            if options.gemma is not None
        ]
        states = tiny_model("qwen3_next", Path(directory) / "states", **STATES)
        cases.append(Case("qwen3_next raw", states, DType.FLOAT32, "raw", options.tokens // 2))
        for case in cases:
            rows += measure(wan, case, options, say)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
