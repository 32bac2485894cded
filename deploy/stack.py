"""The whole path on one machine: a gateway, a remote prefill node, a local prefill node and a local decode node.

Each is a process group of its own that writes to a log file and cannot outlive this process. ``Stack`` starts them,
waits until all are ready, says what failed where one is not, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.progress import Progress

TAIL_LINES = 20
POLL_S = 0.1
STOP_S = 6.0


class StackFailed(Exception):
    """A process of the stack did not come up, or ended; the text holds the tail of its log."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node process. ``options`` are passed to ``prfaas node`` as they are."""

    name: str
    cluster: str
    role: str
    dial: str
    options: tuple[str, ...] = ()


QUICKSTART_NODES = (
    NodeSpec("east-prefill", "east", "prefill", "in"),
    NodeSpec("local-prefill", "local", "prefill", "in"),
    NodeSpec("local-decode", "local", "decode", "out"),
)


@dataclass(frozen=True, slots=True)
class StackSpec:
    """What to start. ``port`` 0 takes a free one; clusters other than ``local`` are registered at the gateway.

    ``ready_s`` bounds each wait for one process.
    """

    model_dir: Path
    model_name: str
    log_dir: Path
    dtype: str = "bfloat16"
    port: int = 0
    threshold: int = 1000
    fallback: str = "local"
    pool_mib: int = 256
    nodes: tuple[NodeSpec, ...] = QUICKSTART_NODES
    gateway_options: tuple[str, ...] = ()
    ready_s: float = 120.0


class Process:
    """One child: its group, its log, and how it ended."""

    def __init__(self, name: str, command: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._popen = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "deploy.leash", str(os.getpid()), command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process, which leads a group of the same number."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def check(self) -> None:
        """Raise StackFailed where it has ended."""
        if not self.running:
            raise StackFailed(f"{self.name} ended with exit status {self._popen.returncode}; {self.tail()}")

    def tail(self) -> str:
        """The end of its log, with the path."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"the end of {self.log}:", *(f"  | {line}" for line in lines)])

    def says(self, text: str) -> bool:
        """Whether ``text`` is in its log."""
        return text in self.log.read_text(errors="replace")

    def terminate(self) -> None:
        """Ask it to stop; a stopped (SIGSTOP) one wakes up for that."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._signal_group(number)

    def wait(self, deadline: float) -> None:
        """Wait until it has ended, at most until ``deadline`` (monotonic), then kill what is left of its group."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._signal_group(signal.SIGKILL)
            self._popen.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Stack:
    """The running processes, by name. Use as a context manager, from a thread that lives as long as the stack."""

    def __init__(self, spec: StackSpec, progress: Progress) -> None:
        self.spec = spec
        self.port = spec.port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, Process] = {}
        self._progress = progress

    def __enter__(self) -> Stack:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _start(self) -> None:
        try:
            self.spec.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StackFailed(f"--log-dir {self.spec.log_dir}: {error.strerror}; name another directory") from error
        with self._progress.step("starting the gateway"):
            self.start_gateway()
        for cluster in sorted({node.cluster for node in self.spec.nodes} - {"local"}):
            self._register(cluster)
        with self._progress.step(f"starting {len(self.spec.nodes)} nodes (loading the model)") as step:
            for node in self.spec.nodes:
                self.start_node(node)
            for n, node in enumerate(self.spec.nodes):
                step.detail = f"{n} of {len(self.spec.nodes)} ready, waiting for {node.name}"
                self.await_node(node)
            step.detail = "waiting for the gateway"
            self._until("gateway", lambda: self._answers("/ready"))
            step.detail = "all ready"

    def start_process(self, name: str, command: str, arguments: Sequence[str]) -> Process:
        """Start one process under ``name``, replacing the record of one that has ended. Raises StackFailed."""
        log = self.spec.log_dir / f"{name}.log"
        try:
            process = Process(name, command, arguments, log)
        except OSError as error:
            raise StackFailed(f"--log-dir: {log} cannot be written: {error.strerror}") from error
        self.processes[name] = process
        return process

    def start_gateway(self) -> None:
        """Start the gateway and wait until it answers. Raises StackFailed."""
        self.start_process("gateway", "gateway.cli:main", ["gateway", *self._gateway_arguments()])
        self._until("gateway", lambda: self._answers("/live"))

    def start_node(self, node: NodeSpec) -> None:
        """Start a node process; ``await_node`` waits until it has joined."""
        self.start_process(node.name, "node.cli:node", self._node_arguments(node))

    def await_node(self, node: NodeSpec) -> None:
        """Wait until the node says that it is ready. Raises StackFailed."""
        self._until(node.name, lambda: self.processes[node.name].says(f"{node.name} ready"))

    def check(self) -> None:
        """Raise StackFailed if any process has ended."""
        for process in self.processes.values():
            process.check()

    def stop(self) -> None:
        """End all processes: nodes first, so that they can take leave of the gateway. Idempotent."""
        nodes = [process for name, process in self.processes.items() if name != "gateway"]
        gateway = [process for name, process in self.processes.items() if name == "gateway"]
        for group in (nodes, gateway):
            deadline = time.monotonic() + STOP_S
            for process in group:
                process.terminate()
            for process in group:
                process.wait(deadline)
        self.processes.clear()

    def _gateway_arguments(self) -> list[str]:
        spec = self.spec
        return [
            *("--model", str(spec.model_dir), "--model-name", spec.model_name, "--dtype", spec.dtype),
            *("--port", str(self.port), "--threshold", str(spec.threshold), "--fallback", spec.fallback),
            *spec.gateway_options,
        ]

    def _node_arguments(self, node: NodeSpec) -> list[str]:
        spec = self.spec
        return [
            *("--role", node.role, "--cluster", node.cluster, "--node-id", node.name, "--gateway", self.url),
            *("--model", str(spec.model_dir), "--model-name", spec.model_name, "--dtype", spec.dtype),
            *("--dial", node.dial, "--pool-mib", str(spec.pool_mib)),
            *node.options,
        ]

    def _register(self, cluster: str) -> None:
        answer = httpx.post(f"{self.url}/v1/clusters", json={"name": cluster, "dial": "in"}, timeout=10)
        if answer.status_code not in (200, 201, 409):
            raise StackFailed(f"registering cluster {cluster}: HTTP {answer.status_code} {answer.text}")

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def _until(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.spec.ready_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise StackFailed(
                    f"{name} was not ready within {self.spec.ready_s:.0f} s; {self.processes[name].tail()}"
                )
            time.sleep(POLL_S)


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
