"""Copying entries of the pool down before they have to go, so that making room in the pool waits for nothing.

A share of the pool is kept such that it can be had without losing anything: free, or copied below. What would go next
is copied first, and everything that it follows on before it. Nothing is held meanwhile: a copy counts only if the entry
still lay in the same pages when it was done, and its bytes are of the time when it was kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections.abc import Sequence

from kvcache.kept import Block, Entry, EntryKind, Snapshot
from kvcache.tiers.image import Damaged, Image, check, draft, sealed
from kvcache.tiers.index import Below
from kvcache.tiers.level import Level
from kvcache.tiers.places import TierPlaces
from kvcache.tiers.telling import parents_first

log = logging.getLogger(__name__)


class Spiller:
    """``run`` until cancelled. ``recovered`` is set once what an earlier process left was looked through."""

    def __init__(self, places: TierPlaces, safe_share: float) -> None:
        """``safe_share`` of the pool is to be free or copied."""
        self.recovered = asyncio.Event()
        self._places = places
        self._safe_pages = safe_share * places.cache.pool.capacity
        self._news = asyncio.Event()
        places.telling.kept = self._news.set

    async def run(self) -> None:
        """Take over what is there, then copy whenever there is something to copy."""
        for number, level in enumerate(self._places.levels):
            await self._recover(number, level)
        self.recovered.set()
        while True:
            while (way := self._next()) and await self._spill_all(way):
                pass
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._news.wait()

    # ---- what to copy

    @property
    def _is_safe(self) -> bool:
        cache = self._places.cache
        return cache.pool.free_pages + cache.copied_pages >= self._safe_pages

    def _next(self) -> list[Entry]:
        """An entry that would go soon, and what it follows on: to be copied as a whole. Empty where enough is safe.

        The pool lets go of the last entry first, so what comes before it is safe only together with it.
        """
        if self._is_safe or not any(level.health.can_write(self._places.now()) for level in self._places.levels):
            return []
        entry = self._places.cache.next_uncopied()
        return [] if entry is None else _way_to(entry)

    def _pause_s(self) -> float | None:
        """Until a tier is tried again that failed; None where none did."""
        now = self._places.now()
        return min((left for level in self._places.levels if (left := level.health.pause_left_s(now))), default=None)

    # ---- copying

    async def _spill_all(self, way: Sequence[Entry]) -> bool:
        """Copy these, one after another; whether more is worth trying."""
        for entry in way:
            if not await self._spill(entry):
                return False
        return True

    async def _spill(self, entry: Entry) -> bool:
        """Copy one entry, if it is still kept; whether the next one is worth trying."""
        places = self._places
        if not self._is_kept(entry, entry.pages):
            return True
        if places.index.get(*_key(entry)) is not None:  # since before the pool got it again
            places.cache.copied(entry, True)
            return True
        image = self._image(entry)
        pages = entry.pages
        sizes = [level.store.nbytes(image) for level in places.levels]
        for number, level in enumerate(places.levels):
            if not level.health.can_write(places.now()) or not await self._make_room(number, sizes[number]):
                continue
            if not self._is_kept(entry, pages):
                return True
            written = await self._put(number, level, image, places.views(pages))
            if written is None:
                continue
            below = places.index.add(written, sizes[number], number, risen=places.cache.has(*written.key))
            level.count.spills += 1
            level.count.spilled_bytes += sizes[number]
            if self._is_kept(entry, pages):
                places.cache.copied(entry, True)
            else:
                places.forget(below)
            return True
        return False

    async def _put(self, number: int, level: Level, image: Image, views: Sequence[memoryview]) -> Image | None:
        """None where it could not be written.

        A disk that others have filled is used as far as it was, until it has not been full for a while.
        """
        index, nbytes = self._places.index, level.store.nbytes(image)
        try:
            written = await self._places.threads.writer.start(_write, level, image, views)
        except OSError as error:
            self._places.failed(level, error)
            if level.health.is_full and index.used[number] >= nbytes:
                index.capacities[number] = index.used[number]
            return None
        level.health.worked()
        return written

    async def _make_room(self, number: int, nbytes: int) -> bool:
        """Move what is least worth to the next tier, or let go of it, until an entry of this size fits."""
        index, level = self._places.index, self._places.levels[number]
        if not level.health.failed_lately(self._places.now()):
            index.capacities[number] = level.capacity
        if nbytes > index.capacities[number]:
            return False
        while not index.has_room(number, nbytes):
            entry = index.least(number)
            if entry is None:
                return False
            if await self._sink(entry) or entry.pins or index.get(*entry.key) is not entry:
                continue  # it is out of the way, or was asked for meanwhile
            self._places.forget(entry)
            level.count.drops += 1
        return True

    async def _sink(self, entry: Below) -> bool:
        """Move an entry to the next tier below, where there is one that takes it."""
        places, upper, number = self._places, self._places.levels[entry.tier], entry.tier + 1
        if number == len(places.levels) or not places.levels[number].health.can_write(places.now()):
            return False
        lower, image = places.levels[number], self._image(entry)
        nbytes = lower.store.nbytes(image)
        places.index.pin(entry, 1)
        try:
            if not await self._make_room(number, nbytes):
                return False
            await places.threads.writer.start(_move, upper, lower, image, entry.digest)
        except OSError as error:
            places.failed(lower, error)
            return False
        except Damaged:
            upper.count.damaged += 1
            return False
        finally:
            places.index.pin(entry, -1)
        if entry.pins or places.index.get(*entry.key) is not entry:
            places.unlink(lower, entry)  # somebody began to read it where it was
            return False
        lower.health.worked()
        lower.count.spills += 1
        lower.count.spilled_bytes += nbytes
        places.index.move(entry, number, nbytes)
        places.unlink(upper, entry)
        if upper.store.medium != lower.store.medium:
            places.telling.sunk(entry)
        return True

    # ---- taking over

    async def _recover(self, number: int, level: Level) -> None:
        places = self._places

        def wanted(image: Image) -> bool:
            return (image.fingerprint, image.page_bytes) == (places.fingerprint, places.pool.page_bytes)

        try:
            found = await places.threads.writer.start(level.store.recover, wanted)
        except OSError as error:
            places.failed(level, error)
            return
        taken = []
        for image in found:
            nbytes = level.store.nbytes(image)
            fits = places.index.get(*image.key) is None and places.index.has_room(number, nbytes)
            if fits:
                taken.append(places.index.add(image, nbytes, number, risen=places.cache.has(*image.key)))
            else:
                places.threads.writer.start(level.store.drop, image.key)
        if taken:
            log.info("tier %s: %d entries taken over", level.name, len(taken))
            places.telling.recovered(list(parents_first(taken)))

    # ---- inside

    def _is_kept(self, entry: Entry, pages: tuple[int, ...]) -> bool:
        return self._places.cache.entry(*_key(entry)) is entry and entry.pages is pages

    def _image(self, entry: Entry | Below) -> Image:
        """The image of an entry of the pool or of a tier, without its digests."""
        places = self._places
        if isinstance(entry, Below):
            key, parent, pages = entry.key, entry.parent, entry.pages
        else:
            key, pages = _key(entry), len(entry.pages)
            above = entry.parent if isinstance(entry, Block) else None
            parent = key[0] if isinstance(entry, Snapshot) else b"" if above is None else above.hash
        page_bytes = places.pool.page_bytes
        return draft(places.fingerprint, page_bytes, key, parent, entry.tokens, pages, entry.provenance)


def _key(entry: Entry) -> tuple[bytes, EntryKind]:
    assert isinstance(entry, Block | Snapshot)
    return (entry.hash if isinstance(entry, Block) else entry.block.hash), entry.kind


def _way_to(entry: Entry) -> list[Entry]:
    """An entry and the blocks without a copy that it follows on, the first of them first."""
    way = [entry]
    at = entry.block if isinstance(entry, Snapshot) else entry.parent if isinstance(entry, Block) else None
    while at is not None and not at.copied:
        way.append(at)
        at = at.parent
    return way[::-1]


def _write(level: Level, image: Image, views: Sequence[memoryview]) -> Image:
    """Runs in the writer's thread. Raises OSError."""
    written = sealed(image, views)
    level.store.put(written, views)
    return written


def _move(upper: Level, lower: Level, image: Image, digest: bytes) -> None:
    """From one tier to another, verified. Runs in the writer's thread. Raises OSError, and Damaged."""
    size = image.page_bytes
    with mmap.mmap(-1, size * image.pages) as memory, memoryview(memory) as whole:
        views = [whole[at : at + size] for at in range(0, len(whole), size)]
        try:
            upper.store.get(image.key, views)
            check(views, digest)
            lower.store.put(sealed(image, views), views)
        finally:
            for view in views:
                view.release()
