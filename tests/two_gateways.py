"""Two gateways over one real Redis and their nodes, as processes: the nodes are told of the first one alone."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from deploy.progress import Progress
from deploy.stack import NodeSpec, Stack, StackSpec, free_port
from tests.redis_server import RedisServer, running_redis
from tests.stacks import eventually, node

NODES = (node("prefill", "local", "prefill"), node("decode", "local", "decode"))
FIRST, SECOND = "gateway", "gateway-b"
WAIT_S = 30.0


@dataclass
class Stream:
    """One streamed answer, read by a thread of its own."""

    gateway: str
    began: float
    chunks: int = 0
    finish: str | None = None
    status: int = 0
    error: str = ""
    ended: float | None = None
    done: bool = False


class TwoGateways:
    """``urls`` by name; ``kill`` one and ``start`` it again as another process at the same address."""

    def __init__(self, stack: Stack, redis: RedisServer, options: Sequence[str]) -> None:
        self.stack = stack
        self.redis = redis
        self.model = stack.spec.model_name
        self.urls = {FIRST: stack.url, SECOND: f"http://127.0.0.1:{free_port()}"}
        self.admin = ""
        self.http = httpx.Client(timeout=60.0)
        self._options = options

    def start(self, name: str) -> None:
        """Start a gateway and wait until it answers."""
        if name == FIRST:
            self.stack.start_gateway()
            return
        spec, port = self.stack.spec, self.urls[name].rsplit(":", 1)[1]
        arguments = [
            "gateway",
            *("--model", str(spec.model_dir), "--model-name", spec.model_name, "--dtype", spec.dtype),
            *("--port", port, "--threshold", str(spec.threshold), *self._options),
        ]
        self.stack.start_process(name, "gateway.cli:main", arguments)
        assert eventually(lambda: self.answers(name, "/live"), WAIT_S), self.stack.processes[name].tail()

    def kill(self, name: str) -> None:
        """As kill -9 does, with all of its process group."""
        self.stack.processes[name].wait(0.0)

    def answers(self, name: str, path: str) -> bool:
        """Whether a gateway says 200."""
        try:
            return self.call("GET", name, path, timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False

    def call(self, method: str, name: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        """One request as admin, or with another key."""
        secret = self.admin if key is None else key
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        return self.http.request(method, self.urls[name] + path, headers=headers | more.pop("headers", {}), **more)

    def key(self, **limits: Any) -> str:
        """A client's key, made on the first gateway and known to the second."""
        body = {"role": "client", "name": "load", "route_hint": True} | limits
        made = self.call("POST", FIRST, "/v1/keys", json=body)
        assert made.status_code == 201, made.text
        secret: str = made.json()["key"]
        return secret

    def body(self, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion that speaks exactly so many tokens."""
        plain = prompt if isinstance(prompt, str) else list(prompt)
        fixed = {"model": self.model, "prompt": plain, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return fixed | more

    def complete(
        self, name: str, prompt: str | Sequence[int], max_tokens: int, key: str | None = None
    ) -> httpx.Response:
        """A whole answer."""
        return self.call("POST", name, "/v1/completions", key, json=self.body(prompt, max_tokens))

    def nodes(self, name: str) -> Mapping[str, Any]:
        """Nodes that have joined a gateway, by name."""
        return {one["node_id"]: one for one in self.call("GET", name, "/v1/nodes").json()["nodes"]}

    def await_nodes(self, name: str) -> None:
        """Wait until all nodes have joined a gateway and take work from it."""

        def here() -> bool:
            found = self.nodes(name)
            return len(found) == len(self.stack.spec.nodes) and all(one["accepting"] for one in found.values())

        assert eventually(here, WAIT_S), self.nodes(name)
        assert eventually(lambda: self.answers(name, "/ready"), WAIT_S)

    def stream(self, name: str, prompt: str | Sequence[int], max_tokens: int, key: str | None = None) -> Stream:
        """Begin a streamed answer; it is read in the background."""
        found = Stream(name, time.monotonic())
        secret = self.admin if key is None else key

        def read() -> None:
            try:
                with httpx.stream(
                    "POST",
                    self.urls[name] + "/v1/completions",
                    json=self.body(prompt, max_tokens, stream=True),
                    headers={"Authorization": f"Bearer {secret}"},
                    timeout=60.0,
                ) as answer:
                    found.status = answer.status_code
                    for line in answer.iter_lines():
                        if line == "data: [DONE]":
                            found.done = True
                        elif line.startswith("data: "):
                            chunk = json.loads(line[6:])
                            if "error" in chunk:
                                found.error = chunk["error"]["message"]
                            else:
                                found.chunks += 1
                                found.finish = chunk["choices"][0]["finish_reason"] or found.finish
            except (httpx.HTTPError, ValueError) as error:
                found.error = f"{type(error).__name__}: {error}"
            found.ended = time.monotonic()

        threading.Thread(target=read, daemon=True).start()
        return found


@dataclass
class Setup:
    """What may differ between stacks."""

    nodes: tuple[NodeSpec, ...] = NODES
    options: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


@contextmanager
def two_gateways(model_dir: Path, log_dir: Path, setup: Setup | None = None) -> Iterator[TwoGateways]:
    """Start Redis, both gateways and the nodes; hand it out with an admin key, and leave nothing behind."""
    setup = setup or Setup()
    with running_redis() as redis:
        options = ("--redis", redis.url, "--canary-interval", "0", *setup.options)
        settings: dict[str, Any] = {"dtype": "float32", "pool_mib": 64} | setup.settings
        spec = StackSpec(
            model_dir=model_dir,
            model_name=model_dir.name,
            log_dir=log_dir,
            nodes=setup.nodes,
            gateway_options=options,
            **settings,
        )
        with Stack(spec, Progress(Console(file=io.StringIO()))) as stack:
            both = TwoGateways(stack, redis, options)
            try:
                both.start(SECOND)
                made = both.call("POST", FIRST, "/v1/keys", json={"role": "admin", "name": "root"})
                assert made.status_code == 201, made.text
                both.admin = made.json()["key"]
                for name in both.urls:
                    both.await_nodes(name)
                yield both
            finally:
                both.http.close()
