"""A running stack as tests see it: requests in, records and node figures out, processes at hand."""

from __future__ import annotations

import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from deploy.progress import Progress
from deploy.stack import QUICKSTART_NODES, NodeSpec, Stack, StackSpec

REQUEST_S = 100.0
NO_CANARIES = ("--canary-interval", "0")
"""Tests count what nodes did. An option that follows outweighs it."""


class RunningStack:
    """One stack and an HTTP client for it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.http = httpx.Client(base_url=stack.url, timeout=REQUEST_S)

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.stack.spec.model_name

    def body(self, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion request that tells its token ids."""
        plain = prompt if isinstance(prompt, str) else list(prompt)
        fixed = {"model": self.model, "prompt": plain, "max_tokens": max_tokens, "temperature": 0}
        return fixed | {"ignore_eos": True, "return_token_ids": True} | more

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int, hint: str | None = "remote", **more: Any
    ) -> httpx.Response:
        """Send one completion and wait for the whole answer."""
        headers = {} if hint is None else {"x-prfaas-route-hint": hint}
        return self.http.post("/v1/completions", json=self.body(prompt, max_tokens, **more), headers=headers)

    def record(self, answer: httpx.Response) -> dict[str, Any]:
        """The decision record of an answer."""
        found = self.http.get(f"/v1/decisions/{answer.headers['x-request-id']}")
        assert found.status_code == 200, found.text
        record: dict[str, Any] = found.json()
        return record

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What each joined node says of itself, by name."""
        answer = self.http.get("/v1/nodes")
        assert answer.status_code == 200, answer.text
        return {node["node_id"]: node for node in answer.json()["nodes"]}

    def failed_first_attempts(self) -> float:
        """How many requests have lost their first attempt so far, whatever was done about it."""
        text = self.http.get("/metrics").text
        return sum(float(count) for count in re.findall(r"^prfaas_fallbacks_total\{.*\} (\S+)$", text, re.MULTILINE))

    def await_idle(self, within_s: float = 10.0) -> None:
        """Wait until every node has joined and none holds a page, a job or a transfer."""
        assert eventually(lambda: not self.held(), within_s), self.held()

    def held(self) -> dict[str, Any]:
        """Nodes that are missing or hold something, with what they said."""
        nodes = self.nodes()
        found: dict[str, Any] = {spec.name: "missing" for spec in self.stack.spec.nodes if spec.name not in nodes}
        return found | {name: figures for name, figures in nodes.items() if not idle(figures)}

    def engine_pid(self, node: str) -> int:
        """The engine process of a node."""
        engines = [pid for pid in children(self.stack.processes[node].pid) if b"engines.embedded" in command_line(pid)]
        assert len(engines) == 1, engines
        return engines[0]


def idle(node: dict[str, Any]) -> bool:
    """Whether a node that is ready for work holds nothing."""
    said = node["heartbeat"]
    if said is None or not node["accepting"] or node["jobs"]:
        return False
    busy = [said[name] for name in ("queued_jobs", "queued_tokens", "running", "open_transfers")]
    return not any(busy) and said["pages_free"] == said["pages_total"]


@contextmanager
def running_stack(model_dir: Path, log_dir: Path, **changes: Any) -> Iterator[RunningStack]:
    """Start a stack of tiny proportions, hand it out, and leave nothing behind."""
    settings: dict[str, Any] = {"dtype": "float32", "pool_mib": 64, "nodes": QUICKSTART_NODES} | changes
    settings["gateway_options"] = (*NO_CANARIES, *settings.get("gateway_options", ()))
    spec = StackSpec(model_dir=model_dir, model_name=model_dir.name, log_dir=log_dir, **settings)
    with Stack(spec, Progress(Console(file=io.StringIO()))) as stack:
        running = RunningStack(stack)
        try:
            yield running
        finally:
            running.http.close()


def node(name: str, cluster: str, role: str, *options: str, dial: str | None = None) -> NodeSpec:
    """A node of a stack; prefill nodes accept connections and decode nodes dial unless told otherwise."""
    return NodeSpec(name, cluster, role, dial or ("in" if role == "prefill" else "out"), options)


def some_ids(count: int, vocab: int = 512, seed: int = 1) -> list[int]:
    """Token ids that are no special tokens, the same for equal arguments."""
    source = random.Random(seed * 1_000_003 + count)
    return [source.randrange(4, vocab) for _ in range(count)]


def eventually(condition: Callable[[], Any], within_s: float, every_s: float = 0.05) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def children(pid: int) -> list[int]:
    """Child processes of ``pid``, at any depth."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def command_line(pid: int) -> bytes:
    """The arguments of a process, empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def send_signal(pid: int, number: int) -> None:
    """Signal one process, not its group."""
    os.kill(pid, number)
