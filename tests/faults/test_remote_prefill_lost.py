"""A remote prefill node dies, hangs or is cut off in mid-transfer: noticed within five seconds, mended as told."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from deploy.stack import free_port
from tests.faults.proxy import SlowProxy
from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import RunningStack, eventually, node, running_stack, send_signal, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = 8000
TOKENS = 4
NOTICED_S = 5.0
KV_BYTES_PER_S = 400_000
MID_TRANSFER_BYTES = 30_000
REMOTE = "east-prefill"


@dataclass(frozen=True, slots=True)
class Scene:
    """A stack whose remote KV path leads through a slow proxy."""

    stack: RunningStack
    proxy: SlowProxy

    def restart_remote(self) -> None:
        """Start the remote node again after its process has ended, and wait until it is ready."""
        spec = next(each for each in self.stack.stack.spec.nodes if each.name == REMOTE)
        self.stack.stack.start_node(spec)
        assert eventually(lambda: self.stack.stack.processes[REMOTE].says(f"{REMOTE} ready"), 60)

    @property
    def remote_pid(self) -> int:
        """The remote node's process."""
        return self.stack.stack.processes[REMOTE].pid


@dataclass(frozen=True, slots=True)
class Fault:
    """How something breaks, what it is called then, and how it is mended."""

    strike: Callable[[Scene], None]
    causes: frozenset[str]
    mend: Callable[[Scene], None]


def kill_node(scene: Scene) -> None:
    send_signal(scene.remote_pid, signal.SIGKILL)


def kill_engine(scene: Scene) -> None:
    send_signal(scene.stack.engine_pid(REMOTE), signal.SIGKILL)


def stop_node(scene: Scene) -> None:
    send_signal(scene.remote_pid, signal.SIGSTOP)


def stop_engine(scene: Scene) -> None:
    send_signal(scene.stack.engine_pid(REMOTE), signal.SIGSTOP)


def let_it_recover(scene: Scene) -> None:
    """A lost engine is restarted by its node."""


FAULTS = {
    "node_killed": Fault(kill_node, frozenset({"node_lost", "peer_lost"}), Scene.restart_remote),
    "engine_killed": Fault(kill_engine, frozenset({"engine_lost"}), let_it_recover),
    "node_stopped": Fault(
        stop_node,
        frozenset({"node_lost", "peer_lost"}),
        lambda scene: send_signal(scene.remote_pid, signal.SIGCONT),
    ),
    "engine_stopped": Fault(stop_engine, frozenset({"engine_lost"}), let_it_recover),
    "silent_cut": Fault(lambda scene: scene.proxy.cut(), frozenset({"peer_lost"}), lambda scene: scene.proxy.heal()),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(params=["local", "fail"])
def scene(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Scene]:
    port = free_port()
    proxy = SlowProxy(port, KV_BYTES_PER_S)
    kv = ("--kv-port", str(port), "--kv-advertise", f"127.0.0.1:{proxy.port}")
    nodes = (
        node(REMOTE, "east", "prefill", *kv),
        node("local-prefill", "local", "prefill"),
        node("local-decode", "local", "decode"),
    )
    try:
        with running_stack(model, tmp_path / "logs", nodes=nodes, fallback=request.param, ready_s=90.0) as stack:
            yield Scene(stack, proxy)
    finally:
        proxy.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_mid_transfer_is_noticed_and_nothing_is_kept(scene: Scene, model: Path, name: str) -> None:
    fault = FAULTS[name]
    scene.stack.await_idle(60)
    prompt = some_ids(PROMPT)
    with ThreadPoolExecutor(1) as sender:
        pending = sender.submit(scene.stack.complete, prompt, TOKENS, hint="remote")
        await_mid_transfer(scene, pending)
        fault.strike(scene)
        assert eventually(scene.stack.failed_first_attempts, NOTICED_S)
        answer = pending.result()
    try:
        if scene.stack.stack.spec.fallback == "local":
            check_fallback(scene.stack, answer, fault)
            assert answer.json()["choices"][0]["token_ids"] == PlainModel(model).speak(prompt, TOKENS).token_ids
        else:
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] in fault.causes
    finally:
        fault.mend(scene)
    scene.stack.await_idle(60)


def await_mid_transfer(scene: Scene, pending: Future[httpx.Response]) -> None:
    before = scene.proxy.forwarded
    assert eventually(lambda: scene.proxy.forwarded - before > MID_TRANSFER_BYTES or pending.done(), 30, 0.002)
    assert not pending.done(), pending.result().text


def check_fallback(stack: RunningStack, answer: httpx.Response, fault: Fault) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prfaas-route"] == "local"
    record = stack.record(answer)
    assert record["fallback"] is True
    assert record["route"] == "local"
    first, second = record["attempts"]
    assert (first["cluster"], first["outcome"]) == ("east", "failed")
    assert first["cause"] in fault.causes
    assert (second["cluster"], second["outcome"]) == ("local", "finished")
