"""Gateways that are replaced behind one port while answers stream: what becomes of the streams, and of new requests.

    python -m tests.bench.rolling_restart [--streams 100] [--tokens 1500] [--turns 2] [--json]

Real processes: one prefill node and two decode nodes of a tiny random-weight model, and gateways that take over from
each other by ``--handover``. So many streams are open, each of so many tokens; then, ``--turns`` times, a new gateway
takes over while short requests go on coming, on new connections and on kept ones. No stream may be lost or truncated,
no request refused, and every gateway that was replaced must end by itself. The exit status is 1 where one of these
does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from deploy.progress import Progress
from deploy.stack import Process, Stack, StackSpec
from tests.faults.matrix.outcome import Kind, Outcome, of_response, of_stream
from tests.models import tiny_model
from tests.stacks import eventually, node, some_ids

DEADLINE_S = 300.0
SHORT_TOKENS = 3
BETWEEN_S = 4.0
DECODERS = ("d-1", "d-2")


@dataclass(slots=True)
class Clients:
    """Slow streams and short requests against one URL, from a thread of their own."""

    url: str
    streams: int
    tokens: int
    long: list[Outcome] = field(default_factory=list)
    short: list[Outcome] = field(default_factory=list)
    begun: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0)
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, limits=limits) as http:
            await asyncio.gather(
                *(self._stream(http, n) for n in range(self.streams)), self._kept(http), self._anew(), self._anew()
            )

    async def _stream(self, http: httpx.AsyncClient, number: int) -> None:
        self.long.append(await _guarded(self._streamed(http, number)))

    async def _streamed(self, http: httpx.AsyncClient, number: int) -> Outcome:
        body = _body(number, self.tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        lines = []
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return of_response(answer.status_code, await answer.aread(), self.tokens)
            async for line in answer.aiter_lines():
                self.begun += not lines
                lines.append(line)
        return of_stream(lines, self.tokens)

    async def _kept(self, http: httpx.AsyncClient) -> None:
        """On whatever connections are kept."""
        while not self.stopping.is_set():
            self.short.append(await _guarded(_short(http)))
            await asyncio.sleep(0.05)

    async def _anew(self) -> None:
        """Each on a connection of its own."""
        while not self.stopping.is_set():
            async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S) as http:
                self.short.append(await _guarded(_short(http)))


async def _short(http: httpx.AsyncClient) -> Outcome:
    answer = await http.post("/v1/completions", json=_body(1, SHORT_TOKENS))
    return of_response(answer.status_code, answer.content, SHORT_TOKENS)


async def _guarded(work: Any) -> Outcome:
    began = time.monotonic()
    try:
        outcome: Outcome = await work
    except httpx.HTTPError as error:
        outcome = Outcome(Kind.UNREACHABLE, type(error).__name__)
    return Outcome(outcome.kind, outcome.detail, time.monotonic() - began)


def _body(seed: int, tokens: int) -> dict[str, Any]:
    ids = some_ids(20, seed=seed)
    return {"model": "tiny", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def measure(streams: int, tokens: int, turns: int, folder: Path) -> dict[str, Any]:
    """Begin the streams, replace the gateway, see all to its end."""
    options = ("--max-running", str(streams), "--max-queue", str(4 * streams))
    nodes = (
        node("home-prefill", "local", "prefill", *options),
        *(node(name, "local", "decode", *options) for name in DECODERS),
    )
    spec = StackSpec(
        model_dir=tiny_model("llama", folder / "model"),
        model_name="tiny",
        log_dir=folder / "logs",
        dtype="float32",
        pool_mib=256,
        nodes=nodes,
        gateway_options=(
            *("--handover", str(folder / "port"), "--drain-timeout", str(DEADLINE_S)),
            *("--state", str(folder / "state.db"), "--request-timeout", str(DEADLINE_S)),
        ),
    )
    with Stack(spec, Progress(Console(file=io.StringIO()))) as stack:
        clients = Clients(stack.url, streams, tokens)
        thread = threading.Thread(target=lambda: asyncio.run(clients.run()))
        thread.start()
        assert eventually(lambda: clients.begun == streams, 120), f"{clients.begun} streams have begun"
        gateways, takeovers = [stack.processes["gateway"]], []
        for turn in range(turns):
            time.sleep(BETWEEN_S)
            began = time.monotonic()
            gateways.append(_replace(stack, turn))
            takeovers.append(round(time.monotonic() - began, 2))
        open_then = streams - len(clients.long)
        time.sleep(BETWEEN_S)
        clients.stopping.set()
        thread.join()
        ended = [eventually(lambda one=one: not one.running, 60) for one in gateways[:-1]]
    return {
        "streams": dict(Counter(_name(one) for one in clients.long)),
        "open_after_the_last_takeover": open_then,
        "short_requests": dict(Counter(_name(one) for one in clients.short)),
        "slowest_short_s": round(max(one.seconds for one in clients.short), 2),
        "takeover_s": takeovers,
        "replaced_gateways_ended": all(ended),
    }


def _replace(stack: Stack, turn: int) -> Process:
    """Start another gateway with the same arguments; returns when it serves."""
    name = f"gateway-{turn + 2}"
    process = stack.start_process(name, "gateway.cli:main", ["gateway", *stack._gateway_arguments()])
    assert eventually(lambda: process.says("listening on"), 60), process.tail()
    return process


def _name(outcome: Outcome) -> str:
    return f"{outcome.kind}:{outcome.detail}" if outcome.detail else str(outcome.kind)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--turns", type=int, default=2, help="how often the gateway is replaced")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.streams, options.tokens, options.turns, Path(folder))
    print(json.dumps(figures, indent=1) if options.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))
    fine = {str(Kind.ANSWER)}
    lost = set(figures["streams"]) | set(figures["short_requests"])
    return 0 if lost <= fine and figures["replaced_gateways_ended"] else 1


if __name__ == "__main__":
    sys.exit(main())
