"""A tier in memory: bound to its node where it should be, never beyond what it has."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from pathlib import Path

import pytest

from kvcache.tiers.image import Damaged
from kvcache.tiers.memory import MemoryStore, bind
from tests.kvcache.test_tiers_files import KEY, PAGE, image, memory

numa = pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/sys/devices/system/node/node0").exists(), reason="no NUMA node 0"
)


def test_bytes_come_back_until_they_are_dropped() -> None:
    store = MemoryStore(PAGE, 4, None)
    pages, back = memory(3), memory(3, seed=50)
    written = image(pages)
    store.put(written, pages)
    store.put(written, pages)
    store.get(KEY, back)
    assert [bytes(page) for page in back] == [bytes(page) for page in pages]
    store.drop(KEY)
    with pytest.raises(Damaged, match="0 pages are held"):
        store.get(KEY, back)
    store.close(keep=False)
    store.close(keep=False)


def test_more_than_it_has_is_refused_and_takes_nothing() -> None:
    store = MemoryStore(PAGE, 4, None)
    pages = memory(5)
    with pytest.raises(OSError, match="no page") as refused:
        store.put(image(pages), pages)
    assert refused.value.errno == errno.ENOSPC
    store.put(image(pages[:4]), pages[:4])
    store.close(keep=False)


@numa
def test_memory_is_bound_to_its_node() -> None:
    with mmap.mmap(-1, 16 * PAGE) as arena:
        bind(arena, 0)
        assert policy(arena) == (2, 1), "MPOL_BIND to node 0"
    with mmap.mmap(-1, 16 * PAGE) as arena:
        assert policy(arena)[0] == 0


@numa
@pytest.mark.parametrize("node", [63, 64, 1000])
def test_a_node_that_is_not_there_is_named(node: int) -> None:
    with pytest.raises(OSError, match=f"NUMA node {node}"):
        MemoryStore(PAGE, 4, node)


def policy(arena: mmap.mmap) -> tuple[int, int]:
    """Policy and first nodes of an address (get_mempolicy(2), MPOL_F_ADDR)."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    start = ctypes.c_char.from_buffer(arena)
    address = ctypes.c_void_p(ctypes.addressof(start))
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(ctypes.c_long(239), ctypes.byref(mode), mask, ctypes.c_ulong(1025), address, ctypes.c_ulong(2))
    del start
    assert not done, os.strerror(ctypes.get_errno())
    return mode.value, mask[0]
