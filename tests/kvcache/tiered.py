"""A pool, its cache and tiers below it, with bytes that follow from their names, so that any other bytes show."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from kvcache.blocks import Extent, PagePool
from kvcache.chain import TokenChain
from kvcache.hostpool import HostPool
from kvcache.kept import EntryKind, Provenance, StoredBlock
from kvcache.lease import Lease
from kvcache.prefix_cache import Match, PrefixCache
from kvcache.quality import Quality
from kvcache.room import PageRoom
from kvcache.tiers.files import FileStore
from kvcache.tiers.hierarchy import Tiers
from kvcache.tiers.level import Level

BLOCK, BLOCK_PAGES, SNAPSHOT_PAGES, PAGE_BYTES = 4, 2, 3, 4096
EXACT = Provenance(origin="here")


class Ear:
    """Where each block and snapshot is, as a gateway that hears all would have it."""

    def __init__(self) -> None:
        self.places: dict[tuple[bytes, EntryKind], str] = {}

    def stored(self, blocks: Sequence[StoredBlock], medium: str = "CPU") -> None:
        for block in blocks:
            if block.quality is Quality.EXACT:
                self.places[block.hash, EntryKind.BLOCK] = medium

    def snapshot(self, hash: bytes, quality: Quality, medium: str = "CPU") -> None:
        if quality is Quality.EXACT:
            self.places[hash, EntryKind.SNAPSHOT] = medium

    def removed(self, hashes: Sequence[bytes], kind: EntryKind, medium: str = "CPU") -> None:
        for name in hashes:
            if self.places.get((name, kind)) == medium:
                del self.places[name, kind]


class Tiered:
    """``rate`` is what the node is said to prefill, in tokens per second; ``now`` a clock that tests may turn."""

    def __init__(
        self,
        levels: Sequence[Level],
        pages: int,
        rate: float = 10.0,
        now: Callable[[], float] = time.monotonic,
        safe_share: float = 1.0,
    ) -> None:
        self.ear = Ear()
        self.levels = levels
        self.pool = HostPool.create(PAGE_BYTES, pages)
        self.pages = PagePool(pages)
        self.tiers = Tiers(levels, PAGE_BYTES, self.ear, lambda: rate)
        self.cache = PrefixCache(
            self.pages, BLOCK, snapshots=True, value=self.tiers.costs.value, listener=self.tiers.telling
        )
        self.room = PageRoom(self.pages, cache=self.cache)
        self.tiers.attach(self.cache, self.room, self.pool, "model", now, snapshots=True, safe_share=safe_share)
        self._jobs = 0

    @staticmethod
    def chain(tokens: Sequence[int]) -> TokenChain:
        return TokenChain.of(tokens, BLOCK, fingerprint="model", salt="tenant")

    def keep(self, tokens: Sequence[int], provenance: Provenance = EXACT) -> TokenChain | None:
        """Keep all blocks of a prompt, and a snapshot at its end, as a job would; None where there is no room."""
        chain = self.chain(tokens)
        self._jobs += 1
        owner = f"job:{self._jobs}"
        taken = self.room.take_spare(owner, len(chain.hashes) * BLOCK_PAGES + SNAPSHOT_PAGES)
        if taken is None:
            return None
        parts = [taken[n * BLOCK_PAGES : (n + 1) * BLOCK_PAGES] for n in range(len(chain.hashes))]
        for name, pages in zip(chain.hashes, parts, strict=True):
            self.fill(pages, name, EntryKind.BLOCK, provenance)
        snapshot = taken[len(parts) * BLOCK_PAGES :]
        self.fill(snapshot, chain.hashes[-1], EntryKind.SNAPSHOT, provenance)
        self.cache.keep(owner, chain, 0, parts, provenance)
        self.cache.keep_snapshot(owner, chain, len(parts) * BLOCK, snapshot, provenance)
        self.room.release(owner)
        return chain

    def fill(self, pages: Sequence[int], name: bytes, kind: EntryKind, provenance: Provenance) -> None:
        for at, page in enumerate(pages):
            self.page(page)[:] = content(name, kind, at, provenance)

    def page(self, number: int) -> memoryview:
        return self.pool.view(Extent(number, 0, PAGE_BYTES))

    def check_bytes(self) -> None:
        """All that the cache keeps are the bytes of what it is kept as."""
        for block in self.cache.stored():
            for kind in EntryKind:
                entry = self.cache.entry(block.hash, kind)
                for at, page in enumerate(() if entry is None else entry.pages):
                    assert self.page(page) == content(block.hash, kind, at, entry.provenance), "other bytes are kept"

    def check(self) -> None:
        self.cache.check_integrity()
        self.tiers._index.check_integrity()
        self.check_bytes()
        assert self.ear.places.keys() == {
            key
            for kind in EntryKind
            for key in [*((b.hash, kind) for b in self.cache.stored()), *(e.key for e in self.tiers._index)]
            if key[1] is kind and self._is_exact(key)
        }
        for entry in self.tiers._index:
            assert entry.risen == self.cache.has(*entry.key)
        for (name, kind), medium in self.ear.places.items():
            below = self.tiers._index.get(name, kind)
            in_files = below is not None and self.levels[below.tier].store.medium == "STORAGE"
            kept = self.cache.entry(name, kind)
            if kept is None or kept.provenance.quality is Quality.EXACT:
                assert medium == ("CPU" if kept is not None or not in_files else "STORAGE")

    def _is_exact(self, key: tuple[bytes, EntryKind]) -> bool:
        kept, below = self.cache.entry(*key), self.tiers._index.get(*key)
        found = [each.provenance.quality for each in (kept, below) if each is not None]
        return Quality.EXACT in found

    def match(self, tokens: Sequence[int], quality: Quality = Quality.EXACT) -> Match:
        return self.cache.match(self.chain(tokens).hashes, quality)

    async def bring(
        self, tokens: Sequence[int], quality: Quality = Quality.EXACT, resume: bool = True, **more: bool
    ) -> Lease | None:
        deadline = asyncio.get_running_loop().time() + 10
        return await self.tiers.bring(self.chain(tokens), len(tokens), quality, deadline, resume=resume, **more)

    async def copied(self, within: float = 5.0) -> None:
        """Wait until the spiller has nothing to do."""
        async with asyncio.timeout(within):
            while not self.tiers._spiller._is_safe and self.cache.next_uncopied() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    def evict_all(self) -> None:
        self.cache.evict(self.cache.evictable_pages)


def content(name: bytes, kind: EntryKind, at: int, provenance: Provenance) -> bytes:
    """What a page of an entry holds."""
    seed = name + kind.value.encode() + bytes([at]) + provenance.quality.value.encode()
    return hashlib.shake_128(seed).digest(64) * (PAGE_BYTES // 64)


def ids(*parts: int) -> list[int]:
    """One block of equal tokens for each part."""
    return [part for part in parts for _ in range(BLOCK)]


def files(directory: Path, mib: float = 1.0) -> Level:
    return Level("disk", FileStore(directory), int(mib * (1 << 20)))


@contextlib.asynccontextmanager
async def tiered(*levels: Level, pages: int = 40, keep: bool = False, **more: object) -> AsyncIterator[Tiered]:
    """Tiers at work; at the end nothing of them is left but the files that they should keep."""
    bench = Tiered(levels, pages, **more)  # type: ignore[arg-type]
    bench.tiers.start()
    try:
        await asyncio.wait_for(bench.tiers.recovered(), 5)
        yield bench
    finally:
        await bench.tiers.close(keep)
        bench.pool.close()
