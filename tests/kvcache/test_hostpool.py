"""The pool's shared memory, between processes and at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.blocks import Extent
from kvcache.hostpool import HostPool


@pytest.fixture
def pool():
    pool = HostPool.create(8192, 4)
    yield pool
    pool.close()


def test_a_new_pool_reads_as_zeros(pool: HostPool) -> None:
    assert len(pool.buffer) == 32768
    assert not any(pool.buffer)


def test_an_extent_is_its_pages_bytes_and_no_others(pool: HostPool) -> None:
    pool.view(Extent(2, 100, 3))[:] = b"abc"
    assert bytes(pool.buffer[2 * 8192 + 99 : 2 * 8192 + 104]) == b"\0abc\0"
    assert [bytes(view) for view in pool.views([Extent(2, 100, 2), Extent(2, 102, 1)])] == [b"ab", b"c"]


@pytest.mark.parametrize(
    "extent",
    [Extent(4, 0, 1), Extent(-1, 0, 1), Extent(0, 8192, 1), Extent(0, 8000, 193), Extent(0, -1, 1), Extent(0, 8, -1)],
)
def test_an_extent_outside_its_page_is_refused(pool: HostPool, extent: Extent) -> None:
    with pytest.raises(ValueError, match="leaves a pool of 4 pages of 8192 bytes"):
        pool.view(extent)


@pytest.mark.parametrize(
    ("page_bytes", "pages", "field"), [(0, 1, "page_bytes"), (5000, 1, "page_bytes"), (4096, 0, "pages")]
)
def test_impossible_sizes_are_refused(page_bytes: int, pages: int, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        HostPool.create(page_bytes, pages)


def test_a_child_process_sees_and_writes_the_same_bytes(pool: HostPool) -> None:
    pool.view(Extent(1, 0, 4))[:] = b"ping"
    code = (
        "import sys; from kvcache.hostpool import HostPool; from kvcache.blocks import Extent\n"
        "pool = HostPool.attach(int(sys.argv[1]), 8192, 4)\n"
        "assert bytes(pool.view(Extent(1, 0, 4))) == b'ping'\n"
        "pool.view(Extent(3, 8188, 4))[:] = b'pong'\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(pool.fd)], pass_fds=[pool.fd], check=True, cwd=root, timeout=30)
    assert bytes(pool.view(Extent(3, 8188, 4))) == b"pong"


def test_a_pool_of_another_size_is_not_attached_and_the_descriptor_stays_the_callers(pool: HostPool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="holds 32768 bytes, expected 5 pages of 8192"):
        HostPool.attach(pool.fd, 8192, 5)
    assert len(os.listdir("/proc/self/fd")) == before
    os.fstat(pool.fd)


def test_nobody_can_shrink_the_pool_under_another_ones_feet(pool: HostPool) -> None:
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)


def test_closing_twice_is_harmless_and_releases_every_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = HostPool.create(4096, 2)
    other = HostPool.attach(pool.fd, 4096, 2)
    for each in (pool, other, pool, other):
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_view_outlives_the_pool_that_made_it() -> None:
    pool = HostPool.create(4096, 1)
    view = pool.view(Extent(0, 0, 4))
    view[:] = b"live"
    pool.close()
    pool.close()
    assert bytes(view) == b"live"


def test_a_killed_owner_leaves_nothing_in_shared_memory() -> None:
    code = (
        "import time; from kvcache.hostpool import HostPool; from kvcache.blocks import Extent\n"
        "pool = HostPool.create(1 << 20, 4); pool.view(Extent(0, 0, 1))[:] = b'x'\n"
        "print('up', flush=True); time.sleep(60)\n"
    )
    before = sorted(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    assert sorted(os.listdir("/dev/shm")) == before
