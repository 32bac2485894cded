"""Workers are started again when they die, told what the parent is told, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PARENT = """
import sys, time, os, signal
from pathlib import Path
from gateway.workers import supervisor
supervisor.FIRST_PAUSE_S = 0.05
notes = Path(sys.argv[1])
def note(word):
    with notes.open("a") as out:
        out.write(word + "\\n")
def work(number):
    note(f"born {number} {os.getpid()}")
    %s
print(supervisor.Supervisor(2, work, 1.0).run(), flush=True)
"""
WAITS = """
    signal.signal(signal.SIGTERM, lambda *_: (note(f"term {number}"), os._exit(0)))
    signal.signal(signal.SIGHUP, lambda *_: note(f"hup {number}"))
    note(f"ready {number}")
    while True: time.sleep(0.05)
"""
DEAF = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(f"ready {number}")
    while True: time.sleep(0.05)
"""
REFUSES = """
    raise supervisor.Misconfigured
"""


class Parent:
    def __init__(self, work: str, notes: Path) -> None:
        self._notes = notes
        notes.touch()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT % work.strip(), str(notes)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def notes(self, word: str) -> list[list[str]]:
        return [line.split()[1:] for line in self._notes.read_text().splitlines() if line.startswith(word)]

    def until(self, word: str, count: int) -> list[list[str]]:
        give_up = time.monotonic() + 10
        while len(found := self.notes(word)) < count:
            assert time.monotonic() < give_up, self._notes.read_text()
            time.sleep(0.01)
        return found

    def ends(self) -> str:
        said, _ = self.process.communicate(timeout=10)
        return said.decode().strip()


@pytest.fixture
def parents(tmp_path: Path) -> Iterator[list[Parent]]:
    kept: list[Parent] = []
    yield kept
    for one in kept:
        one.process.kill()
        one.process.communicate()


def begin(parents: list[Parent], tmp_path: Path, work: str) -> Parent:
    parents.append(Parent(work, tmp_path / "notes"))
    return parents[-1]


def test_who_dies_is_started_again_and_a_signal_ends_all(parents: list[Parent], tmp_path: Path) -> None:
    one = begin(parents, tmp_path, WAITS)
    one.until("ready", 2)
    first = dict(one.notes("born"))
    os.kill(int(first["1"]), signal.SIGKILL)
    one.until("ready", 3)
    assert [number for number, _ in one.notes("born")].count("1") == 2
    one.process.send_signal(signal.SIGHUP)
    assert sorted(one.until("hup", 2)) == [["0"], ["1"]]
    one.process.send_signal(signal.SIGTERM)
    assert one.ends() == "0"
    assert sorted(one.notes("term")) == [["0"], ["1"]]


def test_who_was_told_to_end_is_followed_at_once_and_the_others_go_on(parents: list[Parent], tmp_path: Path) -> None:
    one = begin(parents, tmp_path, WAITS)
    one.until("ready", 2)
    first = dict(one.notes("born"))
    os.kill(int(first["1"]), signal.SIGTERM)
    one.until("ready", 3)
    assert one.notes("term") == [["1"]]
    assert one.process.poll() is None


def test_a_worker_that_no_start_would_help_ends_all(parents: list[Parent], tmp_path: Path) -> None:
    assert begin(parents, tmp_path, REFUSES).ends() == "1"


def test_who_does_not_end_is_killed(parents: list[Parent], tmp_path: Path) -> None:
    one = begin(parents, tmp_path, DEAF)
    one.until("ready", 2)
    one.process.send_signal(signal.SIGTERM)
    assert one.ends() == "0"


def test_workers_end_with_a_parent_that_was_killed(parents: list[Parent], tmp_path: Path) -> None:
    one = begin(parents, tmp_path, WAITS)
    one.until("ready", 2)
    one.process.kill()
    assert sorted(one.until("term", 2)) == [["0"], ["1"]]
