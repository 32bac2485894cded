"""The host pool's memory: anonymous shared pages that the node owns and its engine processes map.

It is a memfd, so it has no name in any file system and goes away with the last process that maps it, however that
process ends. The size is sealed: no holder of the descriptor can shrink it under another one's feet.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable

from kvcache.blocks import PAGE_ALIGNMENT, Extent


class HostPool:
    """``pages`` pages of ``page_bytes`` bytes each, shared by everyone who holds the descriptor.

    Who owns which page is not known here (see ``blocks.PagePool``): this is only memory.
    """

    def __init__(self, fd: int, page_bytes: int, pages: int) -> None:
        """Use ``create`` or ``attach``. Takes over ``fd``, also where it raises."""
        try:
            size = os.fstat(fd).st_size
            if size != page_bytes * pages:
                raise ValueError(f"fd: the pool holds {size} bytes, expected {pages} pages of {page_bytes}")
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.page_bytes = page_bytes
        self.pages = pages
        self.buffer = memoryview(self._map)
        self._closed = False

    @classmethod
    def create(cls, page_bytes: int, pages: int) -> HostPool:
        """Allocate a pool. Memory is taken from the system as pages are first written, and reads as zeros before.

        Raises ValueError for sizes that are not positive multiples of 4 KiB, OSError where the system refuses.
        """
        if page_bytes < PAGE_ALIGNMENT or page_bytes % PAGE_ALIGNMENT:
            raise ValueError(f"page_bytes must be a positive multiple of {PAGE_ALIGNMENT}, got {page_bytes}")
        if pages < 1:
            raise ValueError(f"pages must be at least 1, got {pages}")
        fd = os.memfd_create("prfaas-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, page_bytes * pages)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, page_bytes, pages)

    @classmethod
    def attach(cls, fd: int, page_bytes: int, pages: int) -> HostPool:
        """Map a pool that another process created; ``fd`` stays the caller's. Raises ValueError for another size."""
        return cls(os.dup(fd), page_bytes, pages)

    def view(self, extent: Extent) -> memoryview:
        """The writable bytes of an extent. Raises ValueError for one that leaves its page or the pool."""
        end = extent.offset + extent.nbytes
        if not 0 <= extent.page < self.pages or extent.offset < 0 or not extent.offset <= end <= self.page_bytes:
            raise ValueError(f"{extent} leaves a pool of {self.pages} pages of {self.page_bytes} bytes")
        base = extent.page * self.page_bytes
        return self.buffer[base + extent.offset : base + end]

    def views(self, extents: Iterable[Extent]) -> list[memoryview]:
        """``view`` of each extent, in order."""
        return [self.view(extent) for extent in extents]

    def close(self) -> None:
        """Give the memory up. Idempotent. Views that are still alive stay valid and keep the mapping until they die."""
        if self._closed:
            return
        self._closed = True
        self.buffer.release()
        os.close(self.fd)
        try:
            self._map.close()
        except BufferError:
            del self._map
