"""The stack that faults strike: one remote and one local prefill node, two decode nodes, and what can break of them.

The remote node's KV goes through a proxy; the gateway's state lies on a file system of its own, which can be full; its
wall clock can be moved. Where there is a redis-server, it shares its state there.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console

from deploy.progress import Progress
from deploy.stack import NodeSpec, Stack, StackSpec, free_port
from tests.faults.proxy import SlowProxy
from tests.models import tiny_model
from tests.redis_server import REDIS, RedisServer, running_redis
from tests.stacks import children, command_line, eventually, node, send_signal

REMOTE, HOME, DECODERS = "east-prefill", "home-prefill", ("d-1", "d-2")
DEADLINE_S = 20.0
LINK_BYTES_PER_S = 8e6
STATE_BYTES = 256 << 20
"""More than the decisions that a gateway keeps on disk take: only the fault should fill it."""
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
"""Of Debian's package libfaketime."""


class Scene:
    """A running stack, and its parts by what can be done to them."""

    def __init__(
        self,
        stack: Stack,
        proxy: SlowProxy,
        disk: Path,
        clock: Path | None,
        config: Path,
        redis: RedisServer | None,
    ) -> None:
        self.stack = stack
        self.proxy = proxy
        self.redis = redis
        self._disk = disk
        self._clock = clock
        self._config = config
        self.http = httpx.Client(base_url=stack.url, timeout=10.0)

    def kill(self, name: str) -> None:
        """SIGKILL one process."""
        send_signal(self.stack.processes[name].pid, signal.SIGKILL)

    def restart(self, name: str) -> None:
        """Start a node that was killed, and wait until it has joined."""
        spec = self._spec(name)
        self.stack.start_node(spec)
        self.stack.await_node(spec)

    def restart_gateway(self) -> None:
        """Start the gateway again, on the same port and state."""
        self.stack.start_gateway()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        send_signal(self.stack.processes[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        send_signal(self.stack.processes[name].pid, signal.SIGCONT)

    def signal_engine(self, name: str, number: signal.Signals) -> None:
        """Signal the engine process of a node alone: SIGKILL ends it, SIGSTOP makes it hang."""
        for pid in children(self.stack.processes[name].pid):
            if b"engines.embedded" in command_line(pid):
                send_signal(pid, number)

    def below(self) -> dict[str, float]:
        """What the processes that ours have started hold: how many there are of each, and the files they have open."""
        found: dict[str, float] = {}
        for name, process in self.stack.processes.items():
            pids = children(process.pid)
            found[f"{name}.children"] = len(pids)
            found[f"{name}.children.files"] = sum(map(_open_files, pids))
        return found

    def fill_disk(self) -> None:
        """Leave not one byte where the gateway keeps its state."""
        with (self._disk / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while filler.write(b"\0" * size) == size:
                        pass

    def free_disk(self) -> None:
        """Give it back."""
        (self._disk / "filler").unlink()

    def move_clock(self, seconds: float) -> None:
        """Have the gateway's wall clock be so far from the true one."""
        assert self._clock is not None
        self._clock.write_text(f"{seconds:+.0f}s\n")

    def canaries(self, every_s: float) -> None:
        """How often the gateway tries idle nodes from now on, by its configuration file; 0: not at all."""
        self._config.write_text(f"canary-interval = {every_s}\n")
        answer = self.http.post("/v1/reload")
        assert answer.status_code == 200, answer.text

    def complete(self) -> bool:
        """Whether every process has joined and can be used."""
        try:
            nodes = self.http.get("/v1/nodes").json()["nodes"]
            ready = self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False
        accepting = {one["node_id"] for one in nodes if one["accepting"]}
        return ready and accepting == {REMOTE, HOME, *DECODERS}

    def await_complete(self, within_s: float = 60.0) -> None:
        """Wait for that."""
        assert eventually(self.complete, within_s), "a process did not come back"

    def _spec(self, name: str) -> NodeSpec:
        return next(each for each in self.stack.spec.nodes if each.name == name)


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has just ended
        return 0


class ClockedStack(Stack):
    """A stack whose gateway's wall clock can be moved; those of its nodes are right."""

    def __init__(self, spec: StackSpec, clock: Path | None) -> None:
        super().__init__(spec, Progress(Console(file=io.StringIO())))
        self._clock = clock

    def start_gateway(self) -> None:
        """Start it with that clock."""
        with faked_time(self._clock):
            super().start_gateway()


@contextmanager
def faked_time(clock: Path | None) -> Iterator[None]:
    """Processes that are started meanwhile read the offset of their wall clock from a file; other clocks stay."""
    if clock is None:
        yield
        return
    faked = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",
    }
    os.environ.update(faked)
    try:
        yield
    finally:
        for name in faked:
            del os.environ[name]


@contextmanager
def full_disk(path: Path) -> Iterator[Path]:
    """A file system of a few MiB; needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STATE_BYTES}", "prfaas-faults", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def scene(folder: Path, logs: Path | None, clock_moves: bool) -> Iterator[Scene]:
    """Start it, hand it out, and leave nothing behind but ``logs``.

    A gateway whose clock can be moved stops for seconds now and then: its threads wait for each other by clocks that
    libfaketime stands before. So only faults of the clock should be struck there.
    """
    folder.mkdir()
    kv_port = free_port()
    proxy = SlowProxy(kv_port, LINK_BYTES_PER_S)
    advertised = ("--kv-port", str(kv_port), "--kv-advertise", f"127.0.0.1:{proxy.port}")
    nodes = (
        node(REMOTE, "east", "prefill", *advertised),
        node(HOME, "local", "prefill"),
        *(node(name, "local", "decode") for name in DECODERS),
    )
    clock = folder / "clock" if clock_moves else None
    if clock is not None:
        clock.write_text("+0s\n")
    config = folder / "gateway.toml"
    config.write_text("canary-interval = 0\n")
    with full_disk(folder / "state") as disk, contextlib.ExitStack() as held:
        held.callback(proxy.close)
        redis = held.enter_context(running_redis()) if REDIS is not None else None
        model = tiny_model("llama", folder / "model")
        spec = StackSpec(
            model_dir=model,
            model_name="tiny",
            log_dir=logs or folder / "logs",
            dtype="float32",
            threshold=300,
            pool_mib=64,
            nodes=nodes,
            gateway_options=(
                *("--state", str(disk / "state.db"), "--request-timeout", str(DEADLINE_S)),
                *(() if redis is None else ("--redis", redis.url)),
                *("--breaker-open", "3", "--queue-timeout", "15", "--config", str(config)),
            ),
        )
        stack = held.enter_context(ClockedStack(spec, clock))
        one = Scene(stack, proxy, disk, clock, config, redis)
        held.callback(one.http.close)
        one.await_complete()
        yield one
