"""A tier that is full or broken is as if it were not there, says so, and comes back."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.prefix_cache import Match
from kvcache.tiers.files import FileStore
from kvcache.tiers.health import FIRST_PAUSE_S, LATELY_S, LONGEST_PAUSE_S, Health
from kvcache.tiers.level import Level
from tests.kvcache.tiered import files, ids, tiered

ROOT = Path(__file__).parent.parent.parent


class Failing(FileStore):
    """Files that fail with the error that is set, and beyond the ``room`` that is left on their disk."""

    writes = reads = 0
    room: int | None = None

    def put(self, image, pages) -> None:
        full = self.room is not None and self._used() + self.nbytes(image) > self.room
        if code := errno.ENOSPC if full else self.writes:
            raise OSError(code, os.strerror(code))
        super().put(image, pages)

    def _used(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def get(self, key, pages) -> None:
        if self.reads:
            raise OSError(self.reads, os.strerror(self.reads))
        super().get(key, pages)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
async def test_jobs_go_on_without_a_tier_that_cannot_be_written(tmp_path: Path, code: int) -> None:
    store, clock = Failing(tmp_path), Clock()
    async with tiered(Level("disk", store, 1 << 20), now=clock) as bench:
        store.writes = code
        for n in range(6):
            assert bench.keep(ids(n, n, n, n)) is not None
            await asyncio.sleep(0.01)
        (report,) = bench.tiers.reports
        assert os.strerror(code) in report.state
        assert report.entries == 0
        bench.check()
        store.writes = 0
        clock.now = FIRST_PAUSE_S + 1
        bench.keep(ids(9))
        await bench.copied()
        assert bench.tiers.reports[0].state == ""
        assert bench.tiers.reports[0].entries > 0


async def test_a_full_tier_still_gives_back_what_it_has_and_a_broken_one_does_not(tmp_path: Path) -> None:
    store, clock = Failing(tmp_path), Clock()
    async with tiered(Level("disk", store, 1 << 20), now=clock) as bench:
        first, second = ids(1, 2, 3, 4), ids(5, 6, 7, 8)
        bench.keep(first)
        bench.keep(second)
        await bench.copied()
        bench.evict_all()
        store.writes = errno.ENOSPC
        bench.keep(ids(9, 9, 9, 9))
        await asyncio.sleep(0.05)
        assert bench.tiers.reports[0].state.startswith("full")
        (await bench.bring(first)).release()
        assert bench.match(first) == Match(16, 16)
        store.reads = errno.EIO
        assert await bench.bring(second) is None
        assert bench.tiers.reports[0].state.startswith("failing")
        bench.check()


async def test_a_disk_that_others_have_filled_is_used_as_far_as_it_was_and_then_grows_again(tmp_path: Path) -> None:
    store, clock = Failing(tmp_path), Clock()
    async with tiered(Level("disk", store, 1 << 20), now=clock) as bench:
        old, new = ids(1, 2, 3, 4), ids(5, 6, 7, 8)
        bench.keep(old)
        await bench.copied()
        bench.evict_all()
        used = bench.tiers.reports[0].used_bytes
        store.writes = errno.ENOSPC
        bench.keep(new)
        await asyncio.sleep(0.05)
        store.room, store.writes = used, 0
        clock.now = FIRST_PAUSE_S + 1
        bench.tiers._spiller._news.set()
        await bench.copied()
        assert bench.tiers.reports[0].used_bytes <= used
        assert bench.tiers.reports[0].drops > 0
        bench.evict_all()
        (await bench.bring(new)).release()
        assert bench.match(new) == Match(16, 16)
        store.room = None
        clock.now += LATELY_S
        bench.keep(ids(6, 6, 6, 6))
        bench.keep(ids(7, 7, 7, 7))
        await bench.copied()
        assert bench.tiers.reports[0].used_bytes > used
        bench.check()


async def test_a_read_that_fails_says_nothing_of_how_fast_the_tier_is(tmp_path: Path) -> None:
    store = Failing(tmp_path)
    async with tiered(Level("disk", store, 1 << 20)) as bench:
        bench.keep(ids(1, 2, 3, 4))
        await bench.copied()
        bench.evict_all()
        store.reads = errno.EIO
        assert await bench.bring(ids(1, 2, 3, 4)) is None
        assert bench.tiers.reports[0].read_bytes_per_s == 0


async def test_a_directory_that_goes_under_a_running_node_costs_it_the_tier_and_no_more(tmp_path: Path) -> None:
    async with tiered(files(tmp_path / "tier")) as bench:
        bench.keep(ids(1, 2, 3, 4))
        await bench.copied()
        bench.evict_all()
        shutil.rmtree(tmp_path / "tier")
        assert await bench.bring(ids(1, 2, 3, 4)) is None
        assert bench.keep(ids(5, 6, 7, 8)) is not None
        await asyncio.sleep(0.05)
        assert "removed" in bench.tiers.reports[0].state
        bench.check()


async def test_a_tier_that_fails_is_passed_over_for_the_next(tmp_path: Path) -> None:
    broken = Failing(tmp_path / "a")
    broken.writes = errno.EIO
    async with tiered(Level("first", broken, 1 << 20), files(tmp_path / "b")) as bench:
        bench.keep(ids(1, 2, 3, 4, 5, 6, 7, 8))
        await bench.copied()
        assert [report.entries for report in bench.tiers.reports] == [0, 9]


def test_pauses_grow_and_end_with_the_first_write_that_goes_well() -> None:
    health = Health()
    now, pauses = 0.0, []
    for _ in range(9):
        assert health.can_write(now)
        health.failed(OSError(errno.EIO, "Input/output error"), now)
        health.failed(OSError(errno.EIO, "Input/output error"), now)
        pauses.append(health.pause_left_s(now))
        assert not health.can_write(now)
        assert not health.can_read(now)
        now += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    health.worked()
    assert (health.failure, health.pause_left_s(now)) == ("", 0.0)


def killed_child(directory: Path) -> list[int]:
    """Have a process copy prompts and kill it; what it said was copied."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.kvcache.spilling", str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        said = [child.stdout.readline() for _ in range(40)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
    finally:
        child.kill()
        child.wait(10)
    return [int(line) for line in said if line.endswith("\n")]


async def test_a_node_that_is_killed_while_it_spills_loses_that_spill_and_no_other(tmp_path: Path) -> None:
    """A real process is killed in the middle of its writes; what it said was copied is there, and verifies."""
    said = await asyncio.to_thread(killed_child, tmp_path)
    assert len(said) >= 40
    (tmp_path / "00").mkdir(exist_ok=True)
    (tmp_path / "00" / f"{'00' * 16}.part").write_bytes(b"half a header")
    async with tiered(files(tmp_path, mib=64), pages=400) as bench:
        for number in said:
            lease = await bench.bring(ids(number, 1, 2), needed=True)
            assert lease is not None, f"prompt {number} was said to be copied"
            assert lease.tokens == 12
            lease.release()
        bench.check()
        assert bench.tiers.reports[0].damaged == 0
    assert not any(path.is_file() for path in tmp_path.rglob("*.part"))  # noqa: ASYNC240
