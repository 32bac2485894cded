"""Bringing a prompt's beginning back into the pool before its job takes its turn.

A reload owns its pages until what lies in them is verified, and takes only pages that are to spare: a job that can
compute what it lacks is never made to wait for room by one that reads. It has a task of its own, which no job's end
stops: what was begun is of use to the next one. Of jobs that want the same, one reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvcache.chain import TokenChain
from kvcache.kept import EntryKind
from kvcache.lease import Lease
from kvcache.prefix_cache import PrefixCache
from kvcache.quality import Quality
from kvcache.room import PageRoom
from kvcache.tiers.image import Damaged, Key, check
from kvcache.tiers.index import Below
from kvcache.tiers.places import READERS, TierPlaces
from kvcache.tiers.store import TierStore

log = logging.getLogger(__name__)

LEAST_PATIENCE_S = 1.0

Item = tuple[TierStore, Key, bytes, Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class Lacking:
    """What the pool lacks of the first ``tokens`` of a prompt, of which it could use ``cached``; all of it is below.

    ``blocks`` are (place in the chain, entry), in order.
    """

    tokens: int
    cached: int
    blocks: tuple[tuple[int, Below], ...]
    snapshot: Below | None

    @property
    def entries(self) -> list[Below]:
        """All of it, in the order in which it is kept."""
        return [entry for _, entry in self.blocks] + ([] if self.snapshot is None else [self.snapshot])


def lacking(
    places: TierPlaces, names: Sequence[bytes], quality: Quality, *, resume: bool, snapshots: bool
) -> Lacking | None:
    """What is to be read for the longest prefix that pool and tiers have together; None where the pool has as much.

    With ``resume`` a prefill must be able to go on behind it; ``snapshots`` says whether the model needs one for that.
    """
    cache = places.cache
    match = cache.match(names, quality)
    cached = match.resumable if resume else match.held
    blocks: list[tuple[int, Below]] = []
    reach, upto, end = 0, 0, None
    for at, name in enumerate(names):
        if not _in_pool(cache, name, EntryKind.BLOCK, quality):
            below = _below(places, name, EntryKind.BLOCK, quality)
            if below is None:
                break
            blocks.append((at, below))
        snapshot = None
        if resume and snapshots and not _in_pool(cache, name, EntryKind.SNAPSHOT, quality):
            snapshot = _below(places, name, EntryKind.SNAPSHOT, quality)
            if snapshot is None:
                continue
        reach, upto, end = at + 1, len(blocks), snapshot
    tokens = reach * cache.block_tokens
    return Lacking(tokens, cached, tuple(blocks[:upto]), end) if tokens > cached else None


class Reloader:
    """``bring`` at any time; ``close`` after the places' threads have settled."""

    def __init__(self, places: TierPlaces, room: PageRoom, *, snapshots: bool) -> None:
        self.no_room = 0
        self._places = places
        self._room = room
        self._snapshots = snapshots
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self._closed = False

    async def bring(
        self, chain: TokenChain, tokens: int, quality: Quality, deadline: float, *, resume: bool, needed: bool = False
    ) -> Lease | None:
        """Have as much of a prompt's first ``tokens`` in the pool as is worth reading; ``deadline`` is the loop's time.

        Returns a soft lease of what can be used then, None where nothing was read. What is ``needed`` is read even if
        computing it were cheaper.
        """
        places, cache, loop = self._places, self._places.cache, asyncio.get_running_loop()
        names = chain.hashes[: tokens // cache.block_tokens]
        waited = own = False
        while not own and not self._closed and loop.time() < deadline:
            wanted = lacking(places, names, quality, resume=resume, snapshots=self._snapshots)
            if wanted is None:
                break
            sizes = self._sizes(wanted.entries)
            task = next((self._running[e.key] for e in wanted.entries if e.key in self._running), None)
            if task is None:
                if not needed and not places.costs.pays(sizes, wanted.tokens - wanted.cached, places.now()):
                    break
                task, own = self._begin(chain, wanted, quality), True
            predicted = places.costs.reload_s(sizes)
            patience = max(2 * predicted, predicted + LEAST_PATIENCE_S)
            await asyncio.wait((task,), timeout=min(patience, deadline - loop.time()))
            waited = True
            if not task.done():
                break
        if not waited:
            return None
        match = cache.match(names, quality)
        held = match.resumable if resume else match.held
        return cache.lease(names, held, quality, resume=resume, revoked=lambda: None) if held else None

    async def close(self) -> None:
        """Return when no reload is under way. Idempotent."""
        self._closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- one reload

    def _begin(self, chain: TokenChain, wanted: Lacking, quality: Quality) -> asyncio.Task[None]:
        self._count += 1
        task = asyncio.create_task(self._reload(f"reload:{self._count}", chain, wanted, quality))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for entry in wanted.entries:
            self._running[entry.key] = task
            self._places.index.pin(entry, 1)
        task.add_done_callback(lambda _: self._over(wanted))
        return task

    def _over(self, wanted: Lacking) -> None:
        for entry in wanted.entries:
            del self._running[entry.key]
            if self._places.index.get(*entry.key) is entry:
                self._places.index.pin(entry, -1)

    async def _reload(self, owner: str, chain: TokenChain, wanted: Lacking, quality: Quality) -> None:
        """Read, verify, keep. What the pool has stays meanwhile, unless somebody's turn needs its room."""
        places, entries = self._places, wanted.entries
        start = wanted.blocks[0][0] if wanted.blocks else wanted.tokens // places.cache.block_tokens
        begin = places.cache.lease(
            chain.hashes, start * places.cache.block_tokens, quality, resume=False, revoked=lambda: None
        )
        if begin is None:
            return
        try:
            pages = self._room.take_spare(owner, sum(entry.pages for entry in entries))
            if pages is None:
                self.no_room += 1
                return
            parts, at = [], 0
            for entry in entries:
                parts.append(pages[at : at + entry.pages])
                at += entry.pages
            began = places.now()
            good = await self._read(entries, parts)
            if good == len(entries):  # what fails says nothing of how fast the others come
                self._learn(entries, places.now() - began)
            self._keep(owner, chain, wanted, parts[:good], begin)
        finally:
            self._room.release(owner)
            begin.release()

    async def _read(self, entries: Sequence[Below], parts: Sequence[tuple[int, ...]]) -> int:
        """How many of the entries lie in their pages now, from the first on; what is damaged is dropped."""
        places = self._places
        items: list[Item] = [
            (places.levels[entry.tier].store, entry.key, entry.digest, places.views(pages))
            for entry, pages in zip(entries, parts, strict=True)
        ]
        step = -(-len(items) // READERS)
        reading = [places.threads.readers.start(_read_all, items[at : at + step]) for at in range(0, len(items), step)]
        done = await asyncio.gather(*reading, return_exceptions=True)
        results: list[BaseException | None] = []
        for at, part in zip(range(0, len(items), step), done, strict=True):
            given_up = len(items[at : at + step])
            results += [part] * given_up if isinstance(part, BaseException) else part
        for entry, result in zip(entries, results, strict=True):
            self._judge(entry, result)
        return next((at for at, result in enumerate(results) if result is not None), len(results))

    def _judge(self, entry: Below, result: BaseException | None) -> None:
        """What cannot be read, or is not what was written, is never asked for again."""
        places, level = self._places, self._places.levels[entry.tier]
        if result is None:
            return
        if isinstance(result, Damaged | FileNotFoundError):
            level.count.damaged += 1
            log.warning("tier %s: an entry is damaged and dropped: %s", level.name, result)
        elif isinstance(result, OSError):
            places.failed(level, result)
        else:
            return  # given up at the end
        if places.index.get(*entry.key) is entry:
            places.forget(entry)

    def _keep(
        self, owner: str, chain: TokenChain, wanted: Lacking, parts: Sequence[tuple[int, ...]], holder: Lease
    ) -> None:
        """Have the cache keep what was read, as exact as it was."""
        places, cache = self._places, self._places.cache
        read = [(at, entry.provenance, pages) for (at, entry), pages in zip(wanted.blocks, parts, strict=False)]
        for (first, provenance), run in groupby(enumerate(read), key=lambda each: (each[1][0] - each[0], each[1][1])):
            blocks = list(run)
            cache.keep(owner, chain, first + blocks[0][0], [pages for _, (_, _, pages) in blocks], provenance, holder)
        whole = len(parts) == len(wanted.entries)
        if whole and wanted.snapshot is not None:
            cache.keep_snapshot(owner, chain, wanted.tokens, parts[-1], wanted.snapshot.provenance)
        for entry in reversed(wanted.entries[: len(parts)]):
            self._kept(entry)
        if whole:
            for tier in {entry.tier for entry in wanted.entries}:
                places.levels[tier].count.hits += 1
                places.levels[tier].count.hit_tokens += wanted.tokens - wanted.cached

    def _kept(self, entry: Below) -> None:
        """An entry below has been read well; where the pool keeps its bytes, those have a copy."""
        places, count = self._places, self._places.levels[entry.tier].count
        count.reloads += 1
        count.reloaded_bytes += entry.nbytes
        kept = places.cache.entry(*entry.key)
        if places.index.get(*entry.key) is entry:
            places.index.used_now(entry)
            if kept is not None and kept.provenance == entry.provenance:
                places.cache.copied(kept, True)

    # ---- inside

    def _sizes(self, entries: Sequence[Below]) -> list[int]:
        sizes = [0] * len(self._places.levels)
        for entry in entries:
            sizes[entry.tier] += entry.nbytes
        return sizes

    def _learn(self, entries: Sequence[Below], seconds: float) -> None:
        """How fast a tier is, from a reload that read of no other."""
        tiers = {entry.tier for entry in entries}
        if len(tiers) == 1:
            nbytes = sum(entry.nbytes for entry in entries)
            self._places.levels[tiers.pop()].speed.read(nbytes, seconds, self._places.now())


def _read_all(items: Sequence[Item]) -> list[BaseException | None]:
    """What became of each. Runs in a reader's thread."""
    results: list[BaseException | None] = []
    for store, key, digest, views in items:
        try:
            store.get(key, views)
            check(views, digest)
        except (OSError, Damaged) as error:
            results.append(error)
        else:
            results.append(None)
    return results


def _in_pool(cache: PrefixCache, name: bytes, kind: EntryKind, quality: Quality) -> bool:
    entry = cache.entry(name, kind)
    return entry is not None and quality.allows(entry.provenance.quality)


def _below(places: TierPlaces, name: bytes, kind: EntryKind, quality: Quality) -> Below | None:
    entry = places.find(name, kind)
    return entry if entry is not None and quality.allows(entry.provenance.quality) else None
