"""A tier in memory of one NUMA node: what a CXL expander in system-RAM mode is to Linux.

The pages are bound to the node and taken from it at once, while whoever asked can still be told that there are not as
many: memory that is bound and runs out later ends processes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from threading import Lock

from kvcache.tiers.image import Damaged, Image, Key

_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235}
_BIND = 2
_POPULATE_WRITE = 23
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class MemoryStore:
    """``pages`` pages of ``page_bytes``, all of ``numa``'s memory where it is not None."""

    medium = "CPU"

    def __init__(self, page_bytes: int, pages: int, numa: int | None) -> None:
        """Raises OSError where the node is not there or has not so much free."""
        self.page_bytes = page_bytes
        self._map = mmap.mmap(-1, page_bytes * pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            if numa is not None:
                bind(self._map, numa)
            self._map.madvise(_POPULATE_WRITE)
        except BaseException:
            self._map.close()
            raise
        self._view = memoryview(self._map)
        self._free = list(range(pages - 1, -1, -1))
        self._held: dict[Key, tuple[int, ...]] = {}
        self._lock = Lock()
        self._closed = False

    def nbytes(self, image: Image) -> int:
        """Its pages."""
        return image.pages * self.page_bytes

    def put(self, image: Image, pages: Sequence[memoryview]) -> None:
        """Copy. Raises OSError (ENOSPC) where there are not enough free pages."""
        self.drop(image.key)
        with self._lock:
            if len(self._free) < len(pages):
                raise OSError(errno.ENOSPC, "no page of this tier is free")
            places = tuple(self._free.pop() for _ in pages)
        for place, page in zip(places, pages, strict=True):
            self._page(place)[:] = page
        with self._lock:
            self._held[image.key] = places

    def get(self, key: Key, pages: Sequence[memoryview]) -> None:
        """Copy back. Raises Damaged where it is not held."""
        places = self._held.get(key, ())
        if len(places) != len(pages):
            raise Damaged(f"{len(places)} pages are held, {len(pages)} were written")
        for place, page in zip(places, pages, strict=True):
            page[:] = self._page(place)

    def drop(self, key: Key) -> None:
        """Its pages are free."""
        with self._lock:
            self._free.extend(self._held.pop(key, ()))

    def recover(self, wanted: Callable[[Image], bool]) -> list[Image]:
        """Memory is gone with its process."""
        return []

    def close(self, keep: bool) -> None:
        """Give the memory back."""
        if not self._closed:
            self._closed = True
            self._view.release()
            self._map.close()

    def _page(self, place: int) -> memoryview:
        return self._view[place * self.page_bytes : (place + 1) * self.page_bytes]


def bind(memory: mmap.mmap, numa: int) -> None:
    """Have all pages of untouched memory come from one NUMA node (mbind(2), MPOL_BIND). Raises OSError."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known for {platform.machine()}")
    mask = (ctypes.c_ulong * (numa // _LONG_BITS + 1))()
    mask[numa // _LONG_BITS] = 1 << numa % _LONG_BITS
    start = ctypes.c_char.from_buffer(memory)
    try:
        address = ctypes.c_void_p(ctypes.addressof(start))
        bits = ctypes.c_ulong(len(mask) * _LONG_BITS + 1)
        libc = ctypes.CDLL(None, use_errno=True)
        size, mode, flags = ctypes.c_ulong(len(memory)), ctypes.c_int(_BIND), ctypes.c_uint(0)
        done = libc.syscall(ctypes.c_long(number), address, size, mode, mask, bits, flags)
    finally:
        del start
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"NUMA node {numa}: {os.strerror(number)}")
