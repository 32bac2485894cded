"""A tier in files: one for each block or snapshot, private to this user, never seen half-written under its name.

Direct I/O goes from the disk to pool pages and back without the kernel's cache in between, which would only hold once
more what the pool holds; where the file system refuses it, I/O is buffered. Nothing is synced: what a crash of the
machine leaves torn is told from what was written by its length and digests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvcache.blocks import PAGE_ALIGNMENT
from kvcache.kept import EntryKind
from kvcache.tiers.image import Damaged, Image, Key, decode_header, encode_header, header_bytes

log = logging.getLogger(__name__)

PART = ".part"
MOST_VECTORS = 512
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_NOT_OURS = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
_NOTHING_ELSE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""No link is followed, and nobody waited for where a pipe lies in a file's place."""
_SUFFIXES = {EntryKind.BLOCK: ".block", EntryKind.SNAPSHOT: ".snapshot"}


class DirectoryTaken(Exception):
    """Another process uses this directory, or others than this user can write to it."""


class FileStore:
    """Files below ``directory``, which is made where it is missing, and belongs to one process at a time."""

    medium = "STORAGE"

    def __init__(self, directory: Path) -> None:
        """Raises OSError, and DirectoryTaken."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise DirectoryTaken(f"{directory} is another user's, or others may write to it; say another one")
        self._directory = directory
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DirectoryTaken(f"{directory} is used by another node; each wants one of its own") from error
        self._direct = os.O_DIRECT
        self._headers: dict[Key, int] = {}
        self._closed = False

    def nbytes(self, image: Image) -> int:
        """Header and pages."""
        return len(encode_header(image)) + image.pages * image.page_bytes

    def put(self, image: Image, pages: Sequence[memoryview]) -> None:
        """Write beside, then rename: under its name a file is whole or not there."""
        if not self._is_ours():
            raise OSError(errno.ESTALE, f"{self._directory} was removed while it was used, or is another node's now")
        header = encode_header(image)
        path = self._path(image.key)
        part = path.with_suffix(PART)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with self._open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd, mmap.mmap(-1, len(header)) as aligned:
                aligned[:] = header
                with memoryview(aligned) as view:
                    _write(fd, [view, *pages])
            part.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._headers[image.key] = len(header)

    def get(self, key: Key, pages: Sequence[memoryview]) -> None:
        """Read past the header, whose length is known from when it was written or recovered."""
        path, begin = self._path(key), self._headers.get(key)
        if begin is None:
            raise Damaged(f"{path.name}: not held")
        try:
            with self._open(path, os.O_RDONLY) as fd:
                want = begin + sum(page.nbytes for page in pages)
                if (size := _file_bytes(fd)) != want:
                    raise Damaged(f"{path.name}: {size} bytes long, {want} were written")
                _read(fd, begin, pages)
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise Damaged(f"{path.name}: no file that was written here") from error
            raise

    def drop(self, key: Key) -> None:
        """Unlink."""
        self._headers.pop(key, None)
        if self._is_ours():
            self._path(key).unlink(missing_ok=True)

    def recover(self, wanted: Callable[[Image], bool]) -> list[Image]:
        """Read the headers of all files; pages are verified when they are read."""
        found, others = [], 0
        for path in self._files():
            try:
                image = self._recovered(path)
                if wanted(image):
                    found.append(image)
                    continue
                others += 1
            except (Damaged, OSError) as error:
                log.warning("tier file dropped: %s: %s", path.name, error)
            with contextlib.suppress(OSError):
                path.unlink()
        if others:
            log.warning("tier files dropped: %d in %s are of another model", others, self._directory)
        for image in found:
            self._headers[image.key] = len(encode_header(image))
        return found

    def close(self, keep: bool) -> None:
        """Unlink all files unless they are to be kept."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            if not keep and self._is_ours():
                self._unlink_all()
        os.close(self._lock)

    # ---- inside

    def _is_ours(self) -> bool:
        """Whether the directory is still the one that is locked: it may have been removed, and made anew by others."""
        try:
            there = os.stat(self._directory / "lock", follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._lock))

    def _path(self, key: Key) -> Path:
        name = key[0].hex()
        return self._directory / name[:2] / (name + _SUFFIXES[key[1]])

    def _unlink_all(self) -> None:
        for path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()
        for folder in self._folders():
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _folders(self) -> Iterator[Path]:
        """Those that this class makes; what else lies in the directory is not ours."""
        for number in range(256):
            folder = self._directory / f"{number:02x}"
            if folder.is_dir():
                yield folder

    def _files(self) -> Iterator[Path]:
        for folder in self._folders():
            for path in sorted(folder.iterdir()):
                if path.suffix in (PART, *_SUFFIXES.values()):
                    yield path

    def _recovered(self, path: Path) -> Image:
        """The image that a file's header tells of. Raises Damaged and OSError."""
        if path.suffix == PART:
            raise Damaged("never finished")
        fd = os.open(path, os.O_RDONLY | _NOTHING_ELSE)
        try:
            length = _file_bytes(fd)
            begin = os.pread(fd, PAGE_ALIGNMENT, 0)
            size = header_bytes(begin)
            image = decode_header(begin + os.pread(fd, size - len(begin), len(begin)))
        finally:
            os.close(fd)
        if length != size + image.pages * image.page_bytes:
            raise Damaged("cut off")
        if self._path(image.key) != path:
            raise Damaged("its name is another one's")
        return image

    @contextlib.contextmanager
    def _open(self, path: Path, flags: int) -> Iterator[int]:
        """The descriptor, for direct I/O where it can be. A file system that refuses says so when opening."""
        flags |= _NOTHING_ELSE
        try:
            fd = os.open(path, flags | self._direct, 0o600)
        except OSError as error:
            if not self._direct or error.errno not in _REFUSALS:
                raise
            log.info("no direct I/O in %s: buffered", self._directory)
            self._direct = 0
            fd = os.open(path, flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


def _file_bytes(fd: int) -> int:
    """How long a file is. Raises Damaged for what is none."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise Damaged("no file")
    return found.st_size


def _write(fd: int, parts: Sequence[memoryview]) -> None:
    """All of it, from the file's beginning. Raises OSError; direct I/O goes in steps of whole pages."""
    at = 0
    for views in _batches(parts):
        want = sum(view.nbytes for view in views)
        while want:
            done = os.pwritev(fd, _behind(views, sum(view.nbytes for view in views) - want), at)
            if not done:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            at, want = at + done, want - done


def _read(fd: int, at: int, parts: Sequence[memoryview]) -> None:
    """Fill ``parts``. Raises OSError, and Damaged at the file's end."""
    for views in _batches(parts):
        want = sum(view.nbytes for view in views)
        while want:
            done = os.preadv(fd, _behind(views, sum(view.nbytes for view in views) - want), at)
            if not done:
                raise Damaged("cut off")
            at, want = at + done, want - done


def _batches(parts: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    return (parts[at : at + MOST_VECTORS] for at in range(0, len(parts), MOST_VECTORS))


def _behind(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``done`` bytes."""
    left = []
    for view in views:
        if done < view.nbytes:
            left.append(view[done:])
        done = max(0, done - view.nbytes)
    return left
