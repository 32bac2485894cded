"""Files of a tier: private, whole or not there, told from others, gone when they should be."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache.kept import EntryKind, Provenance
from kvcache.tiers import files as module
from kvcache.tiers.files import DirectoryTaken, FileStore
from kvcache.tiers.image import Damaged, Image, check, decode_header, draft, encode_header, header_bytes, sealed

PAGE = 4096
KEY = (bytes(range(16)), EntryKind.BLOCK)


def memory(pages: int, seed: int = 1) -> list[memoryview]:
    """Aligned pages, as those of the pool are."""
    view = memoryview(mmap.mmap(-1, pages * PAGE))
    for at in range(pages):
        view[at * PAGE : (at + 1) * PAGE] = bytes([(seed + at) % 256]) * PAGE
    return [view[at * PAGE : (at + 1) * PAGE] for at in range(pages)]


def image(pages: list[memoryview], key=KEY, fingerprint: str = "model") -> Image:
    provenance = Provenance(codecs=("lossless",), origin="east")
    return sealed(draft(fingerprint, PAGE, key, b"p" * 16, 64, len(pages), provenance), pages)


def everything(image: Image) -> bool:
    return True


def test_a_header_says_what_was_written_and_where_the_pages_begin() -> None:
    written = image(memory(300))
    header = encode_header(written)
    assert len(header) % PAGE == 0
    assert header_bytes(header[:PAGE]) == len(header) == 2 * PAGE
    assert decode_header(header) == written
    assert written.provenance == Provenance(codecs=("lossless",), origin="east")


def test_every_bit_of_a_header_counts() -> None:
    header = encode_header(image(memory(2)))
    used = len(header.rstrip(b"\0"))
    for at in range(used):
        for bit in range(0, 8, 3):
            harmed = bytearray(header)
            harmed[at] ^= 1 << bit
            with pytest.raises(Damaged):
                decode_header(harmed)


@pytest.mark.parametrize("length", [0, 5, 29, 100, 4095])
def test_a_header_cut_off_is_none(length: int) -> None:
    with pytest.raises(Damaged):
        decode_header(encode_header(image(memory(2)))[:length])


def test_bytes_come_back_and_nobody_else_may_read_the_files(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "tier")
    pages = memory(700)
    written = image(pages)
    store.put(written, pages)
    (path,) = (tmp_path / "tier").rglob("*.block")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == (tmp_path / "tier").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_size == store.nbytes(written)
    back = memory(700, seed=99)
    store.get(KEY, back)
    assert [bytes(page) for page in back] == [bytes(page) for page in pages]
    check(back, written.digest)
    store.drop(KEY)
    store.drop(KEY)
    assert not path.exists()
    store.close(keep=False)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_system_without_direct_io_is_used_all_the_same(tmp_path: Path, direct: bool, monkeypatch) -> None:
    opened = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **more)

    if not direct:
        monkeypatch.setattr(module.os, "open", refuse)
    store = FileStore(tmp_path)
    pages = memory(3)
    store.put(image(pages), pages)
    back = memory(3, seed=9)
    store.get(KEY, back)
    assert bytes(back[2]) == bytes(pages[2])
    assert direct or not store._direct
    store.close(keep=False)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    store = FileStore(tmp_path)
    pages = memory(3)

    def full(fd, views, at):
        if at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, views[0])

    monkeypatch.setattr(module.os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        store.put(image(pages), pages)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "lock"]
    store.close(keep=False)


def test_what_an_earlier_process_left_is_taken_over_if_it_is_whole_and_wanted(tmp_path: Path) -> None:
    before = FileStore(tmp_path)
    keys = [(bytes([n]) * 16, EntryKind.BLOCK if n % 2 else EntryKind.SNAPSHOT) for n in range(7)]
    for n, key in enumerate(keys):
        pages = memory(2, seed=n)
        before.put(image(pages, key, "other" if n == 6 else "model"), pages)
    before.close(keep=True)
    found = {path.stem: path for path in tmp_path.rglob("*.*")}
    paths = [found[key[0].hex()] for key in keys]
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    data = bytearray(paths[2].read_bytes())
    data[40] ^= 1
    paths[2].write_bytes(data)
    paths[3].rename(paths[3].with_suffix(".part"))
    paths[4].rename(paths[4].with_stem("04" * 15 + "05"))
    (tmp_path / "00" / "mine.txt").write_text("of somebody else")
    after = FileStore(tmp_path)
    recovered = after.recover(lambda image: image.fingerprint == "model")
    assert {image.key for image in recovered} == {keys[0], keys[5]}
    left = {path.name for path in tmp_path.rglob("*.*")}
    assert left == {paths[0].name, paths[5].name, "mine.txt"}
    back = memory(2, seed=77)
    after.get(keys[5], back)
    assert bytes(back[0]) == bytes([5]) * PAGE
    after.close(keep=False)
    assert {path.name for path in tmp_path.rglob("*.*")} == {"mine.txt"}


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with pytest.raises(DirectoryTaken, match="used by another node"):
        FileStore(tmp_path)
    store.close(keep=False)
    FileStore(tmp_path).close(keep=False)


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(DirectoryTaken, match="others may write"):
        FileStore(tmp_path)


def link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("become", [link, pipe, folder])
def test_what_lies_in_place_of_a_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, become: Callable[[Path], None]
) -> None:
    store = FileStore(tmp_path)
    pages = memory(1)
    store.put(image(pages), pages)
    (path,) = tmp_path.rglob("*.block")
    become(path)
    with pytest.raises(Damaged):
        store.get(KEY, memory(1))
    store.close(keep=True)
    after = FileStore(tmp_path)
    assert after.recover(lambda image: True) == []
    after.close(keep=False)


def test_what_is_not_held_is_not_there(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with pytest.raises(Damaged, match="not held"):
        store.get(KEY, memory(1))
    store.close(keep=False)


def test_a_directory_that_was_removed_belongs_to_whoever_makes_it_again(tmp_path: Path) -> None:
    old = FileStore(tmp_path / "tier")
    pages = memory(1)
    old.put(image(pages), pages)
    shutil.rmtree(tmp_path / "tier")
    with pytest.raises(OSError, match="removed while it was used"):
        old.put(image(pages), pages)
    new = FileStore(tmp_path / "tier")
    new.put(image(pages), pages)
    with pytest.raises(OSError, match="another node's now"):
        old.put(image(pages), pages)
    old.drop(KEY)
    old.close(keep=False)
    new.get(KEY, memory(1))
    new.close(keep=False)
    assert not list(tmp_path.rglob("*.block"))
