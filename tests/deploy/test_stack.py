from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from deploy.cli import _chat_template
from deploy.progress import Progress
from deploy.stack import Process, Stack, StackFailed, StackSpec


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(command: str, *arguments: str) -> Process:
        process = Process(command, f"tests.deploy.fakes:{command}", arguments, tmp_path / f"{command}.log")
        started.append(process)
        return process

    yield begin
    for process in started:
        process.wait(0.0)


@pytest.mark.parametrize("taken", ["logs", "logs/gateway.log/x"])
def test_a_log_directory_that_cannot_be_written_is_named(tmp_path: Path, taken: str) -> None:
    path = tmp_path / taken
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way")
    spec = StackSpec(model_dir=tmp_path, model_name="tiny", log_dir=tmp_path / "logs")
    with pytest.raises(StackFailed, match=f"--log-dir.*{tmp_path / 'logs'}"), Stack(spec, Progress(Console())):
        pass


@pytest.mark.parametrize(
    ("settings", "given"),
    [(None, True), (b"{}", True), (b'{"chat_template": "x"}', False), (b"{", False), (b"[1]", False), (b"\xff", False)],
)
def test_only_a_model_that_is_known_to_lack_a_chat_template_is_given_one(
    tmp_path: Path, settings: bytes | None, given: bool
) -> None:
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_bytes(settings)
    assert bool(_chat_template(tmp_path)) is given


def test_a_process_that_fails_is_reported_with_the_end_of_its_log(start: Callable[..., Process]) -> None:
    process = start("broken")
    assert eventually(lambda: not process.running)
    with pytest.raises(StackFailed, match=r"(?s)broken ended with exit status 1.*no such model: /nowhere"):
        process.check()


def test_a_process_stops_when_asked_even_while_it_is_suspended(start: Callable[..., Process]) -> None:
    process = start("sleeper", "s1")
    assert eventually(lambda: process.says("s1 ready"))
    os.kill(process.pid, signal.SIGSTOP)
    process.terminate()
    began = time.monotonic()
    process.wait(began + 10)
    assert gone(process.pid)
    assert time.monotonic() - began < 5


def test_a_process_that_will_not_stop_is_killed(start: Callable[..., Process]) -> None:
    process = start("deaf")
    assert eventually(lambda: process.says("deaf ready"))
    process.terminate()
    process.wait(time.monotonic() + 0.2)
    assert gone(process.pid)


PARENT = """
import sys, time
from pathlib import Path
from deploy.stack import Process
child = Process("s2", "tests.deploy.fakes:sleeper", ["s2"], Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(60)
"""


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "s2.log"
    command = [sys.executable, "-c", PARENT, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert eventually(lambda: "s2 ready" in log.read_text())
        parent.kill()
    assert eventually(lambda: gone(child), 3.0)
