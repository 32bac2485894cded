"""The simulator against the live stack: one trace, replayed on both, by a profile that ``prfaas profile`` measured.

    python -m tests.bench.truth MODEL_DIR [--requests 100] [--load 0.6] [--repeats 3] [--json]

A stack with a prefill node at home, one in a remote cluster and a decode node. Their three engines are pinned, and each
gets a share of its core that the kernel keeps, so that each simulated resource is a real one: the two at home have one
core, the remote one, which is quicker, the other with the gateway, the node processes and the clients. All of them have
a higher priority than what else may run, which had better be nothing.

The trace is seeded: short prompts and long ones, some of which go on from an earlier one or begin as others do, answers
of 1 to 12 tokens, Poisson arrivals that keep the busier prefill node ``--load`` of the time busy. Each repeat takes new
token ids of the same lengths at the same moments, so that nothing is cached from the one before. Time to first token is
the clients'. The exit status is 1 where the simulated mean is more than 20 % off the measured one, or P90 more than 30,
medians of ``--repeats``. ``stolen`` is the share of all cores that the hypervisor took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scheduler.measured import Measured
from scheduler.policy import RoutingPolicy
from scheduler.simulator.fleet import Settings
from scheduler.simulator.from_profile import fleet_of, values_of
from scheduler.simulator.records import Spans
from scheduler.simulator.run import simulate
from scheduler.simulator.traffic import Traffic
from tests.bench.cpu_shares import SharesUnavailable, cpu_share, join
from tests.bench.interference import pin
from tests.bench.link_cut import stolen_s
from tests.stacks import RunningStack, running_stack, some_ids

MEAN_OFF, P90_OFF = 0.20, 0.30
SHARES = {"local-prefill": 0.4, "local-decode": 0.4, "east-prefill": 0.55}
"""Of a core, for each engine."""
PRIORITY = -20
THRESHOLD = 450
BLOCK = 64
SHORT, LONG = (64, 400), (500, 1500)
LONG_SHARE, TURN_SHARE, COMMON_SHARE = 0.3, 0.12, 0.15
TURN_TOKENS = (32, 200)
COMMON_TOKENS = 192
ANSWER_TOKENS = (1, 12)
LONGEST = 2048
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Request:
    """One of the trace: when, its token ids, and how long an answer."""

    at: float
    ids: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Answer:
    """What came of one, live or simulated. ``prefill_s`` 0 where nothing was computed but in place."""

    ttft_s: float
    prefill_s: float
    remote: bool
    cached: int


def trace(requests: int, per_s: float, seed: int, ids_seed: int, vocab: int) -> list[Request]:
    """Moments, lengths and what shares what follow from ``seed`` alone, the token ids from ``ids_seed`` too."""
    source, now, made = random.Random(seed), 0.0, list[Request]()
    common = some_ids(COMMON_TOKENS, vocab, ids_seed)

    def between(bounds: tuple[int, int]) -> int:
        return round(bounds[0] * (bounds[1] / bounds[0]) ** source.random())

    for n in range(requests):
        now += source.expovariate(per_s)
        kind, length, earlier = source.random(), between(LONG if source.random() < LONG_SHARE else SHORT), n // 2
        turn, parent = between(TURN_TOKENS), source.randrange(max(1, earlier))
        fresh = some_ids(length, vocab, ids_seed + 1000 + n)
        if earlier and kind < TURN_SHARE:
            ids = [*made[parent].ids, *fresh, *fresh][: len(made[parent].ids) + turn]
        elif kind < TURN_SHARE + COMMON_SHARE:
            ids = [*common, *fresh]
        else:
            ids = fresh
        made.append(Request(now, tuple(ids[:LONGEST]), source.randint(*ANSWER_TOKENS)))
    return made


def traffic_of(requests: list[Request]) -> Traffic:
    """The trace as the simulator takes it: a block is named by all tokens up to its end."""
    names: dict[tuple[int, ...], int] = {}
    blocks = tuple(
        tuple(names.setdefault(each.ids[:end], len(names)) for end in range(BLOCK, len(each.ids) + 1, BLOCK))
        for each in requests
    )
    return Traffic(
        np.array([each.at for each in requests]),
        np.array([len(each.ids) for each in requests], dtype=np.int64),
        np.array([each.output for each in requests], dtype=np.int64),
        blocks,
        BLOCK,
    )


def simulated(measured: Measured, requests: list[Request], threshold: int) -> list[Answer]:
    """What the simulator says of the trace."""
    spans = Spans()
    settings = Settings(threshold_tokens=threshold, late_fallback=True)
    run = simulate(fleet_of(measured), settings, RoutingPolicy(values_of(measured)), traffic_of(requests), spans=spans)
    computed = {span.request: span.end_s - span.begin_s for span in spans.kept if span.name == "prefill"}
    records = run.records
    return [
        Answer(
            _ttft(records.first_at[n], each), computed.get(n, 0.0), bool(records.remote[n]), records.cached_tokens[n]
        )
        for n, each in enumerate(requests)
    ]


def _ttft(first_at: float, request: Request) -> float:
    return inf if isnan(first_at) else first_at - request.at


def ask(stack: RunningStack, request: Request) -> tuple[float, str]:
    """Send one, read its answer to the end: seconds to its first token, and its id."""
    body = stack.body(request.ids, request.output, stream=True)
    began, first = time.monotonic(), None
    with stack.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if first is None and line.startswith("data: "):
                first = time.monotonic() - began
    assert first is not None, "an answer without a token"
    return first, answer.headers["x-request-id"]


def replayed(stack: RunningStack, requests: list[Request]) -> list[Answer]:
    """What the live stack does with the trace. Raises AssertionError where a request fails."""
    with ThreadPoolExecutor(len(requests)) as pool:
        began, asked = time.monotonic(), []
        for each in requests:
            time.sleep(max(0.0, began + each.at - time.monotonic()))
            asked.append(pool.submit(ask, stack, each))
        came = [each.result() for each in asked]
    found = []
    for ttft_s, request_id in came:
        record = stack.http.get(f"/v1/decisions/{request_id}").json()
        assert record["outcome"] == "finished", record["attempts"]
        attempt = record["attempts"][-1]
        remote = record["route"].startswith("remote")
        cached = record["usage"]["cached_tokens"]
        found.append(Answer(ttft_s, attempt.get("prefill_s") or 0.0, remote, cached))
    return found


def figures(answers: list[Answer]) -> dict[str, float]:
    """Of one replay or simulation. ``beside_s`` is all of the time to first token but computing, on average."""
    ttft = [each.ttft_s for each in answers]
    return {
        "mean_s": statistics.mean(ttft),
        "p50_s": float(np.quantile(ttft, 0.5)),
        "p90_s": float(np.quantile(ttft, 0.9)),
        "compute_s": statistics.mean(each.prefill_s for each in answers),
        "beside_s": statistics.mean(each.ttft_s - each.prefill_s for each in answers),
        "remote_share": statistics.mean(each.remote for each in answers),
        "cached_tokens": statistics.mean(each.cached for each in answers),
    }


def per_s_of(measured: Measured, load: float, seed: int) -> float:
    """The rate at which the busier prefill node, were nothing cached, would be ``load`` of the time busy."""
    curves = (measured.home.prefill, measured.clusters[0].prefill)
    work = [0.0, 0.0]
    drawn = trace(1000, 1.0, seed, 0, 512)
    for each in drawn:
        away = len(each.ids) - 1 > THRESHOLD
        work[away] += curves[away].seconds(0, len(each.ids) - 1)
    return load * len(drawn) / max(work)


def profiled(stack: RunningStack, directory: Path, *options: str) -> Measured:
    """The stack's profile, by the command."""
    out = directory / "profile.json"
    command = [sys.executable, "-m", "gateway.cli", "profile", "--gateway", stack.stack.url, "--out", str(out)]
    subprocess.run([*command, *options], check=True, cwd=ROOT, stdout=sys.stderr, timeout=900)
    return Measured.of(out.read_bytes())


def measure(options: argparse.Namespace, say: Console) -> dict[str, Any]:
    """Profile once, then replay and simulate as often as asked."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("prfaas: two cores are needed")
    home, away = cores[:2]
    rows, stolen = [], []
    with ExitStack() as held:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory()))
        where = {"local-prefill": home, "local-decode": home, "east-prefill": away}
        groups = {name: held.enter_context(cpu_share(name, SHARES[name])) for name in where}
        os.sched_setaffinity(0, {away})
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        settings = {"dtype": options.dtype, "pool_mib": 1024, "threshold": THRESHOLD}
        stack = held.enter_context(running_stack(options.model_dir, directory / "logs", **settings))
        for name, core in where.items():
            pin(stack.engine_pid(name), core)
            join(groups[name], stack.engine_pid(name))
        stack.await_idle(60)
        measured = profiled(stack, directory, "--longest", str(LONGEST), "--within", str(options.profile_within))
        if options.keep is not None:
            options.keep.write_bytes(measured.encoded())
        vocab = stack.http.get("/v1/status").json()["model"]["vocab_size"]
        per_s = per_s_of(measured, options.load, options.seed)
        say.print(f"{per_s:.2f} requests a second")
        for repeat in range(options.repeats):
            requests = trace(options.requests, per_s, options.seed, 10_000 * (repeat + 1), min(vocab, 200_000))
            stack.await_idle(60)
            before, began = stolen_s(), time.monotonic()
            live = replayed(stack, requests)
            stolen.append((stolen_s() - before) / (time.monotonic() - began) / (os.cpu_count() or 1))
            twin = simulated(measured, requests, THRESHOLD)
            same = statistics.mean(one.remote == other.remote for one, other in zip(live, twin, strict=True))
            rows.append({"live": figures(live), "simulated": figures(twin), "same_way": same})
            if options.keep is not None:
                options.keep.with_suffix(f".{repeat}.json").write_text(json.dumps(_rows(requests, live, twin)))
            say.print(f"run {repeat + 1} of {options.repeats}: stolen {stolen[-1]:.1%}")
            say.print(_table(rows[-1:]))
    return summary(rows) | {"stolen": statistics.mean(stolen), "load_average": os.getloadavg()[1], "runs": rows}


def _rows(requests: list[Request], live: list[Answer], twin: list[Answer]) -> list[dict[str, Any]]:
    return [
        {"at": each.at, "tokens": len(each.ids), "output": each.output, "live": asdict(one), "simulated": asdict(other)}
        for each, one, other in zip(requests, live, twin, strict=True)
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far off the simulator was, medians over the runs, and whether that holds."""
    off = {
        name: statistics.median(row["simulated"][name] / row["live"][name] - 1 for row in rows)
        for name in ("mean_s", "p90_s")
    }
    holds = abs(off["mean_s"]) <= MEAN_OFF and abs(off["p90_s"]) <= P90_OFF
    return {"mean_off": off["mean_s"], "p90_off": off["p90_s"], "holds": holds}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("", *rows[0]["live"], "same way")
    for row in rows:
        for which in ("live", "simulated"):
            table.add_row(which, *(f"{value:.3f}" for value in row[which].values()), f"{row['same_way']:.2f}")
    return table


def main() -> None:
    """Measure; the exit status says whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--load", type=float, default=0.6, help="of the busier prefill node")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile-within", type=float, default=150.0, help="seconds")
    parser.add_argument("--keep", type=Path, help="write the profile here, and each run's requests beside it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = measure(options, Console(stderr=True, width=140))
    except SharesUnavailable as error:
        raise SystemExit(f"prfaas: {error}") from error
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        Console(width=140).print(_table(found.pop("runs")))
        Console(width=140).print(found)
    sys.exit(0 if found["holds"] else 1)


if __name__ == "__main__":
    main()
