"""Packets of the KV path vanish, in a network namespace of its own: no reset, no close, only silence."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.test_remote_prefill_lost import NOTICED_S, PROMPT, TOKENS
from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import eventually, node, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLONE_NEWNET = 0x40000000
KV_PORT = 7001
RATE = "4mbit"


def enter_fresh_namespace() -> None:
    """Give the calling thread, and what it starts, a network of its own. Skips where that is not permitted."""
    if shutil.which("tc") is None or shutil.which("ip") is None:
        pytest.skip("needs ip and tc (Debian: iproute2)")
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        pytest.skip(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    run("ip link set lo up")


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def slow_down_kv() -> None:
    """Send packets from and to the KV port through a class of its own, at ``RATE``."""
    run("tc qdisc add dev lo root handle 1: htb")
    run(f"tc class add dev lo parent 1: classid 1:10 htb rate {RATE}")
    for end in ("sport", "dport"):
        run(f"tc filter add dev lo parent 1: protocol ip u32 match ip {end} {KV_PORT} 0xffff flowid 1:10")


def drop_kv() -> None:
    """Let that class hold no packet: all are dropped."""
    run("tc qdisc add dev lo parent 1:10 bfifo limit 1")


def received(path: Path = Path("/proc/thread-self/net/dev")) -> int:
    """Bytes that the namespace's loopback has carried."""
    line = next(line for line in path.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def scenario(model: Path, logs: Path) -> None:
    enter_fresh_namespace()
    slow_down_kv()
    nodes = (
        node("east-prefill", "east", "prefill", "--kv-port", str(KV_PORT)),
        node("local-prefill", "local", "prefill"),
        node("local-decode", "local", "decode"),
    )
    prompt = some_ids(PROMPT)
    with running_stack(model, logs, nodes=nodes) as stack, ThreadPoolExecutor(1) as sender:
        stack.await_idle(30)
        pending = sender.submit(stack.complete, prompt, TOKENS, hint="remote")
        before = received()
        assert eventually(lambda: received() - before > 500_000 or pending.done(), 30, 0.01)
        assert not pending.done()
        drop_kv()
        assert eventually(stack.failed_first_attempts, NOTICED_S)
        answer = pending.result()
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-prfaas-route"] == "local"
        assert stack.record(answer)["attempts"][0]["cause"] == "peer_lost"
        assert answer.json()["choices"][0]["token_ids"] == PlainModel(model).speak(prompt, TOKENS).token_ids
        stack.await_idle(15)


def test_dropped_packets_are_noticed_and_the_answer_is_equal(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "llama")
    with ThreadPoolExecutor(1) as apart:
        apart.submit(scenario, model, tmp_path / "logs").result()
