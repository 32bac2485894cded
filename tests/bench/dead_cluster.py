"""A remote cluster that dies at full load: what becomes of the local one, which could not carry the load alone.

    python -m tests.bench.dead_cluster [--how silent|hung|slow|link] [--seconds 40] [--json]

The gateway is real; nodes speak the real protocol and take the time that real ones would take, by sleeping: one
prefill node at home (2,000 tokens/s, chunks of 256, the job of least rank first), four remote ones twice as quick.
Short prompts (500 tokens, 2.25 a second) stay at home, which they keep 56 % busy; long ones (4,000 tokens, 1.5 a
second) go away, and would need three times what home has. Then the remote nodes go silent (as a cut link makes them),
or take jobs and answer nothing (``hung``). Or they only work at a third of their rate (``slow``), or the way from there
carries a tenth of what it did, two thirds of what should go there (``link``): then no node may be given up.

Both phases have the same requests at the same moments: a quarter more or fewer short ones in half a minute would change
their times by more than anything that the gateway does.

Held against: the median and P90 of the short prompts' time to first token at most 1.5 times what they were; prefill
of fallbacks at home within its budget, 20 % of any 30 s; every request ended in an answer or an error with a code. The
exit status is 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.app import Gateway
from gateway.clusters import Dial
from gateway.config import GatewayConfig
from gateway.front import Front
from gateway.joining.stream_protocol import StreamProtocol
from gateway.model import load_model
from gateway.state import State
from kvcache.control import GenerateJob, ModelInfo, PrefillDone, PrefillJob, PrefillStarted, TransferDone
from kvcache.layout import DType
from kvcache.wire import Role
from scheduler.budget import BudgetValues
from scheduler.values import PolicyValues
from tests.gateway.fakes import FakeNode, delta, finish, transfer_of
from tests.gateway.model_files import write_model
from tests.models import CONTEXT, VOCAB
from tests.stacks import some_ids

CHUNK = 256
HOME_RATE, REMOTE_RATE = 2000.0, 4000.0
SHORT, LONG = 500, 4000
SHORT_PER_S, LONG_PER_S = 2.25, 1.5
THRESHOLD = 1000
ANSWER = 4
KV_BYTES = 256
"""Of a token: two layers of two heads of eight, K and V, fp32."""
LINK_RATE = 1e7
"""Bytes per second: nothing waits for the link, as long as it is well."""
SLOWER, NARROWER = 3.0, 10.0
DEADLINE_S = 30.0
SETTLE_S = 5.0
"""Before all figures: until every node has been measured."""
MOST_TTFT = 1.5


class Machine:
    """What computes prefills: one chunk after the other, each of the job of least rank."""

    def __init__(self, tokens_per_s: float) -> None:
        self.rate = tokens_per_s
        self._jobs: list[tuple[int, int, _Prefill]] = []
        self._numbers = itertools.count()
        self._wake = asyncio.Event()

    async def compute(self, tokens: int, priority: int, told: Callable[[int], None]) -> float:
        """Return the seconds that it took once ``tokens`` are computed; cancelling takes it off.

        ``told`` hears how many are, after every chunk.
        """
        job = _Prefill(tokens, asyncio.get_running_loop().create_future(), lambda left: told(tokens - left))
        heapq.heappush(self._jobs, (priority, next(self._numbers), job))
        self._wake.set()
        try:
            await job.done
        finally:
            job.left = 0
        return tokens / self.rate

    async def run(self) -> None:
        """Until cancelled."""
        due = time.monotonic()
        while True:
            while self._jobs and self._jobs[0][2].left <= 0:
                heapq.heappop(self._jobs)
            if not self._jobs:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
                continue
            job = self._jobs[0][2]
            chunk = min(CHUNK, job.left)
            due += chunk / self.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            job.left -= chunk
            if not job.done.done():
                job.told(job.left)
            if job.left <= 0 and not job.done.done():
                job.done.set_result(None)


@dataclass(slots=True)
class _Prefill:
    left: int
    done: asyncio.Future[None]
    told: Callable[[int], None]


class Line:
    """The way from the remote nodes: one transfer after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.rate = bytes_per_s
        self._turn = asyncio.Lock()

    async def carry(self, nbytes: int) -> float:
        """Return the seconds that it took once they have arrived."""
        began = time.monotonic()
        async with self._turn:
            await asyncio.sleep(nbytes / self.rate)
        return time.monotonic() - began


@dataclass(slots=True)
class Cluster:
    """Nodes that take their time. ``dead`` ones answer nothing more."""

    home: Machine = field(default_factory=lambda: Machine(HOME_RATE))
    line: Line = field(default_factory=lambda: Line(LINK_RATE))
    computed: dict[bytes, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    came: dict[str, float] = field(default_factory=dict)
    """When each job came to its prefill node, by its transfer."""
    dead: bool = False
    silent: bool = False
    """Dead ones do not even say that they begin."""

    def prefilling(self, machine: Machine, remote: bool) -> Any:
        async def script(node: FakeNode, job: PrefillJob) -> None:
            transfer = transfer_of(node, job.ticket)
            self.came[transfer.hex()] = time.monotonic()
            if not (remote and self.silent):
                await node.send(PrefillStarted(transfer))
            await self._unless_dead(remote)

            def told(tokens: int) -> None:
                node.prefilled[transfer.hex()] = tokens

            took = await machine.compute(len(job.token_ids) - 1, job.priority, told)
            await self._unless_dead(remote)
            await node.send(PrefillDone(transfer, took, len(job.token_ids) - 1))
            self.computed[transfer].set()

        return script

    async def generate(self, node: FakeNode, job: GenerateJob) -> None:
        if job.source is not None:
            transfer = transfer_of(node, job.source.ticket)
            await self.computed[transfer].wait()
            del self.computed[transfer]
            nbytes = KV_BYTES * (len(job.token_ids) - 1)
            took = 0.001 if job.source.node_id == "home" else await self.line.carry(nbytes)
            await node.send(TransferDone(transfer, nbytes, nbytes, "raw", took, took, b"\1" * 16))
        else:
            await asyncio.sleep(len(job.token_ids) / HOME_RATE)
        tokens = job.sampling.max_tokens
        for token in range(tokens):
            await node.send(delta(job, 300 + token, "a "))
        await finish(node, job, "length", tokens)

    async def _unless_dead(self, remote: bool) -> None:
        if remote and self.dead:
            await asyncio.Event().wait()


@dataclass(slots=True)
class Seen:
    """What clients of one kind saw in one phase: times to first token, and how requests ended."""

    ttft_s: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        spread = statistics.quantiles(self.ttft_s, n=10) if len(self.ttft_s) > 1 else [float("nan")] * 9
        return {"ttft_p50_s": round(spread[4], 4), "ttft_p90_s": round(spread[8], 4), "ends": dict(self.ends)}


class Clients:
    """Open-loop traffic: requests come at their moments, whatever became of those before."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S + 10, limits=httpx.Limits(max_connections=None))
        self.seen: dict[tuple[str, str], Seen] = defaultdict(Seen)
        self.phase = "warm"
        self._seed = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def during(self, phase: str, seconds: float) -> None:
        """One phase of the traffic; its requests may end after it."""
        self.phase = phase
        kinds = (("short", SHORT, SHORT_PER_S), ("long", LONG, LONG_PER_S))
        traffic = [asyncio.create_task(self._come(*kind)) for kind in kinds]
        await asyncio.sleep(seconds)
        for task in traffic:
            task.cancel()

    async def _come(self, kind: str, tokens: int, per_s: float) -> None:
        source = random.Random(tokens)
        while True:
            await asyncio.sleep(source.expovariate(per_s))
            task = asyncio.create_task(self._ask(kind, tokens, self.phase))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def rest(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _ask(self, kind: str, tokens: int, phase: str) -> None:
        seen, began = self.seen[phase, kind], time.monotonic()
        ids = some_ids(tokens, VOCAB, next(self._seed))
        body = {"model": "tiny", "prompt": ids, "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                if answer.status_code != 200:
                    error = json.loads(await answer.aread())["error"]
                    seen.ends[error["code"] or f"status {answer.status_code} without a code"] += 1
                    return
                async for line in lines:
                    if line.startswith("data: "):
                        seen.ttft_s.append(time.monotonic() - began)
                        break
                rest = [line async for line in lines if line.startswith("data: ")]
                seen.ends["answered" if rest and rest[-1] == "data: [DONE]" else "truncated"] += 1
        except httpx.HTTPError as error:
            seen.ends[f"no answer: {type(error).__name__}"] += 1


async def measure(how: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Both phases on one gateway."""
    model_dir = _model(folder)
    config = GatewayConfig(
        model_dir,
        "tiny",
        DType.FLOAT32,
        port=0,
        threshold_tokens=THRESHOLD,
        policy=PolicyValues(threshold_s=0.0),
        request_timeout_s=DEADLINE_S,
    )
    model = load_model(model_dir, "tiny", DType.FLOAT32)
    gateway = Gateway(config, model, State(None))
    server = uvicorn.Server(
        uvicorn.Config(gateway, port=0, http=Front, ws=StreamProtocol, log_config=None, access_log=False)
    )
    serving = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    info = ModelInfo("tiny", model.fingerprint.parts(), CONTEXT, CHUNK, VOCAB)
    gateway.registry.register("east", Dial.IN)
    cluster, machines = Cluster(), [Machine(REMOTE_RATE) for _ in range(4)]
    many = {"max_queue": 4096}
    nodes = [
        FakeNode(url, "home", Role.PREFILL, info, on_prefill=cluster.prefilling(cluster.home, False), **many),  # type: ignore[arg-type]
        FakeNode(url, "d", Role.DECODE, info, on_generate=cluster.generate, **many),  # type: ignore[arg-type]
        *(
            FakeNode(
                url,
                f"east-{n}",
                Role.PREFILL,
                info,
                cluster="east",
                on_prefill=cluster.prefilling(machine, True),
                **many,  # type: ignore[arg-type]
            )
            for n, machine in enumerate(machines)
        ),
    ]
    for node in nodes:
        await node.start()
    work = [asyncio.create_task(machine.run()) for machine in (cluster.home, *machines)]
    clients = Clients(url)
    await clients.during("warm", SETTLE_S)
    await clients.during("alive", seconds)
    died = time.time()
    if how == "slow":
        for machine in machines:
            machine.rate /= SLOWER
    elif how == "link":
        cluster.line.rate /= NARROWER
    else:
        cluster.dead = True
    if how == "silent":
        cluster.silent = True
        for node in nodes[2:]:
            node.beating = False
    await clients.during("dead", seconds)
    await clients.rest()
    records = [record for record in gateway.decisions.recent(1 << 16) if record["at"] >= died - DEADLINE_S]
    figures = {phase + "_" + kind: seen.figures() for (phase, kind), seen in sorted(clients.seen.items())}
    figures["fallbacks"] = _fallbacks(records, cluster.came)
    causes = Counter(attempt["cause"] for record in records for attempt in record["attempts"] if attempt["cause"])
    figures["attempts_failed"] = dict(causes)
    await clients.http.aclose()
    for node in nodes:
        await node.stop()
    for task in work:
        task.cancel()
    server.should_exit = True
    await serving
    gateway.close()
    return figures


def _fallbacks(records: list[dict[str, Any]], came: dict[str, float]) -> dict[str, float]:
    """How many there were, and the most prefill seconds that came to home with them in any window of the budget."""
    values = BudgetValues()
    sent = sorted(
        came[transfer] for record in records if record["fallback"] and (transfer := record["attempts"][-1]["transfer"])
    )
    most = max((sum(0 <= at - first < values.window_s for at in sent) for first in sent), default=0)
    return {
        "count": len(sent),
        "most_prefill_s": round(most * LONG / HOME_RATE, 2),
        "budget_s": values.share * values.window_s,
    }


def _model(folder: Path) -> Path:
    path = folder / "model"
    path.mkdir()
    write_model(path)
    return path


def judge(figures: dict[str, Any], how: str) -> list[str]:
    """What does not hold."""
    wrong = []
    if how in ("slow", "link") and figures["attempts_failed"].get("stuck"):
        wrong.append("nodes that worked were given up")
    for quantile in ("ttft_p50_s", "ttft_p90_s"):
        before, after = figures["alive_short"][quantile], figures["dead_short"][quantile]
        if not after <= MOST_TTFT * before:
            wrong.append(f"short prompts: {quantile} went from {before} to {after}")
    if figures["fallbacks"]["most_prefill_s"] > figures["fallbacks"]["budget_s"] * 1.05:
        wrong.append(f"fallbacks took {figures['fallbacks']['most_prefill_s']} s of prefill in one window")
    for name, one in figures.items():
        bad = [end for end in one.get("ends", ()) if end == "truncated" or end.startswith(("no answer", "status"))]
        wrong += [f"{name}: {end}" for end in bad]
    return wrong


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=["silent", "hung", "slow", "link"], default="silent")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options.how, options.seconds, Path(folder)))
    wrong = judge(figures, options.how)
    if options.json:
        print(json.dumps(figures | {"wrong": wrong}, indent=1))
    else:
        for name, one in figures.items():
            print(f"{name:<12} {one}")
        print("\n".join(wrong) or "holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
