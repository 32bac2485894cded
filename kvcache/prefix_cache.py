"""The prefix cache of one node: pages of finished transfers and answers, kept under the names of their blocks.

Cache and transfers share one page pool. What is kept costs a transfer nothing: ``PageRoom`` evicts it when a
reservation needs its pages. A *lease* keeps what it covers from being evicted; a lease of a prefix covers all its
blocks, so that whatever nobody holds can always be evicted leaf by leaf. A *soft* lease is given up when there is no
other way to make room.

Two lengths of a prompt's prefix matter: as far as every block is *held*, a transfer to this node may begin behind it;
where a snapshot lies as well, a prefill is *resumable*. Torch-free, no I/O, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcache.blocks import PagePool, PoolFull
from kvcache.chain import TokenChain
from kvcache.eviction import EvictionQueue
from kvcache.kept import Block, CacheListener, Entry, EntryKind, Provenance, Snapshot, StoredBlock, Value, recomputation
from kvcache.lease import Lease
from kvcache.quality import Quality
from kvcache.tally import CacheFigures, Tally


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens of a prompt's prefix, both multiples of the block size, ``resumable`` <= ``held``."""

    held: int
    resumable: int


class PrefixCache:
    """All that one node keeps. ``snapshots`` says whether the model has windows or states, which need them.

    ``on_freed`` is called when pages may have become evictable.
    """

    def __init__(
        self,
        pool: PagePool,
        block_tokens: int,
        *,
        snapshots: bool,
        value: Value = recomputation,
        listener: CacheListener | None = None,
    ) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.on_freed: Callable[[], None] | None = None
        self._snapshots = snapshots
        self._listener = listener
        self._blocks: dict[bytes, Block] = {}
        self._queue = EvictionQueue[Entry](lambda entry: _worth(value, entry), _may_go)
        self._soft: dict[Lease, None] = {}
        self._tally = Tally()

    # ---- what there is

    @property
    def evictable_pages(self) -> int:
        """Pages that ``evict`` can free."""
        return self._tally.kept - self._tally.firm

    @property
    def idle_pages(self) -> int:
        """Pages that can be freed without revoking any lease."""
        return self._tally.kept - self._tally.leased

    @property
    def copied_pages(self) -> int:
        """Pages of entries that a tier below has, too."""
        return self._tally.copied

    @property
    def figures(self) -> CacheFigures:
        """How it does."""
        return self._tally.figures

    def match(self, hashes: Sequence[bytes], quality: Quality) -> Match:
        """How much of the prompt whose full blocks are ``hashes`` can be used at this quality."""
        held = resumable = 0
        for count, name in enumerate(hashes, start=1):
            block = self._blocks.get(name)
            if block is None or not quality.allows(block.provenance.quality):
                break
            held = count
            if not self._snapshots or _usable(block.snapshot, quality):
                resumable = count
        return Match(held * self.block_tokens, resumable * self.block_tokens)

    def has(self, name: bytes, kind: EntryKind) -> bool:
        """Whether the block, or a snapshot at its end, is kept, of whatever quality."""
        block = self._blocks.get(name)
        return block is not None and (kind is EntryKind.BLOCK or block.snapshot is not None)

    def entry(self, name: bytes, kind: EntryKind) -> Block | Snapshot | None:
        """The block, or the snapshot at its end, as it is kept now."""
        block = self._blocks.get(name)
        return block if block is None or kind is EntryKind.BLOCK else block.snapshot

    def stored(self) -> Iterator[StoredBlock]:
        """Every block, parents first."""
        for block in sorted(self._blocks.values(), key=lambda block: block.index):
            yield block.told()

    def stored_snapshots(self) -> Iterator[tuple[bytes, Quality]]:
        """Every snapshot: the block at whose end it lies, and its quality."""
        for block in self._blocks.values():
            if block.snapshot is not None:
                yield block.hash, block.snapshot.provenance.quality

    # ---- what is used

    def lease(
        self,
        hashes: Sequence[bytes],
        tokens: int,
        quality: Quality,
        *,
        resume: bool,
        revoked: Callable[[], None] | None = None,
    ) -> Lease | None:
        """Hold the first ``tokens`` of a prompt, with the snapshot there where ``resume`` asks for it.

        ``tokens`` is a multiple of the block size. With ``revoked`` the lease is soft. None where not all of it is kept
        at this quality.
        """
        blocks = self.find(hashes[: tokens // self.block_tokens])
        usable = all(quality.allows(block.provenance.quality) for block in blocks)
        if not usable or len(blocks) * self.block_tokens != tokens:
            return None
        snapshot = blocks[-1].snapshot if blocks and resume and self._snapshots else None
        if blocks and resume and self._snapshots and not _usable(snapshot, quality):
            return None
        return Lease(self, blocks, snapshot, revoked)

    def used(self, lease: Lease) -> None:
        """Count a lease that has spared its holder something."""
        self._tally.used(lease.tokens)

    def find(self, hashes: Sequence[bytes]) -> list[Block]:
        """The blocks of these names, as far as they are kept."""
        found = []
        for name in hashes:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, lease: Lease, entries: Sequence[Entry], firm: bool) -> None:
        """A lease begins."""
        for entry in entries:
            self._queue.touch(entry)
            self._pin(entry, firm, 1)
        if entries and not firm:
            self._soft[lease] = None

    def let_go(self, lease: Lease, entries: Sequence[Entry], firm: bool) -> None:
        """A lease ends."""
        self._soft.pop(lease, None)
        for entry in entries:
            self._pin(entry, firm, -1)

    def told_freed(self) -> None:
        """Pages may have become evictable."""
        if self.on_freed is not None:
            self.on_freed()

    # ---- what is kept

    def keep(
        self,
        owner: str,
        chain: TokenChain,
        first: int,
        blocks: Sequence[Sequence[int]],
        provenance: Provenance,
        holder: Lease | None = None,
    ) -> int:
        """Keep ``owner``'s pages as the chain's blocks from index ``first`` on; how many of them are kept here now.

        Pages that are not needed stay the owner's: those of a block that is here already in no worse quality. Nothing
        is kept where the block before is not here. ``holder`` holds them, and all before, from the first moment.
        """
        above = chain.parent(first)
        if above is not None and above not in self._blocks:
            return 0
        count = len(blocks)
        held = [self._blocks.get(name) for name in chain.hashes[first : first + count]]
        wanted = [at for at, block in enumerate(held) if block is None or self._better(provenance, block)]
        self.pool.keep(owner, [page for at in wanted for page in blocks[at]])
        told = []
        for at in wanted:
            block = held[at]
            if block is None:
                above = chain.parent(first + at)
                parent = None if above is None else self._blocks[above]
                block = self._add_block(chain, first + at, parent, blocks[at], provenance)
            else:
                self._replace(block, blocks[at], provenance)
            told.append(block)
        if holder is not None:
            holder.grow(chain.hashes[: first + count])
        if told:
            if self._listener is not None:
                self._listener.stored([block.told() for block in told])
            self.told_freed()
        return count

    def keep_snapshot(
        self, owner: str, chain: TokenChain, tokens: int, pages: Sequence[int], provenance: Provenance
    ) -> bool:
        """Keep ``owner``'s pages as windows and states at ``tokens``; False where they stay the owner's.

        That is so where the block that ends there is not kept, or has a snapshot of no worse quality.
        """
        block = self._blocks.get(chain.hashes[tokens // self.block_tokens - 1]) if tokens else None
        if block is None or not pages:
            return False
        if block.snapshot is None:
            self.pool.keep(owner, pages)
            kept = Snapshot(EntryKind.SNAPSHOT, _since_snapshot(block), tuple(pages), provenance, block=block)
            block.snapshot = kept
            self._tally.added(len(pages))
            self._queue.touch(kept)
            self._queue.consider(kept)
            self._queue.consider(block)
        elif self._better(provenance, block.snapshot):
            self.pool.keep(owner, pages)
            self._replace(block.snapshot, pages, provenance)
        else:
            return False
        if self._listener is not None:
            self._listener.snapshot(block.hash, provenance.quality)
        self.told_freed()
        return True

    # ---- what tiers below have, too

    def copied(self, entry: Entry, copied: bool) -> None:
        """A tier below has, or no longer has, what this entry holds: losing it costs something else than before."""
        if copied is not entry.copied:
            self._tally.mark_copied(entry, copied)
            self._queue.revalue(entry)

    def next_uncopied(self) -> Entry | None:
        """What would go next of the entries that no tier below has; None where all have a copy or are held."""
        return self._queue.least(lambda entry: not entry.copied)

    # ---- what goes

    def evict(self, pages: int) -> None:
        """Free at least ``pages`` pages, the least valuable first; soft leases are revoked where that is not enough.

        Raises PoolFull where ``evictable_pages`` are fewer; nothing is evicted then.
        """
        if pages > self.evictable_pages:
            raise PoolFull(f"{pages} pages asked for, {self.evictable_pages} kept ones can be evicted")
        enough = self.pool.free_pages + pages
        gone: list[Entry] = []
        while self.pool.free_pages < enough:
            entry = self._queue.pop()
            if entry is None:
                next(reversed(self._soft)).revoke()
            else:
                self._remove(entry)
                gone.append(entry)
        if self._listener is not None:
            snapshots = [entry.block.hash for entry in gone if isinstance(entry, Snapshot)]
            blocks = [entry.hash for entry in gone if isinstance(entry, Block)]
            if snapshots:
                self._listener.removed(snapshots, EntryKind.SNAPSHOT)
            if blocks:
                self._listener.removed(blocks, EntryKind.BLOCK)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, chains and counters agree with each other and with the pool."""
        self.pool.check_integrity()
        entries: list[Entry] = list(self._blocks.values())
        entries += [block.snapshot for block in self._blocks.values() if block.snapshot is not None]
        pages = [page for entry in entries for page in entry.pages]
        assert len(pages) == len(set(pages)), "a page is kept twice"
        assert set(pages) == self.pool.kept_pages, "pool and cache disagree about what is kept"
        children: dict[bytes, int] = {}
        for block in self._blocks.values():
            if block.parent is not None:
                assert self._blocks.get(block.parent.hash) is block.parent, "a block outlived its parent"
                children[block.parent.hash] = children.get(block.parent.hash, 0) + 1
                assert not block.pins or block.parent.pins, "a firm lease does not hold the beginning of its prefix"
        assert all(block.children == children.get(name, 0) for name, block in self._blocks.items())
        self._tally.check(entries)
        for entry in entries:
            assert bool(entry.stamp) == _may_go(entry), "the eviction queue holds other entries than those that may go"

    # ---- inside

    def _add_block(
        self, chain: TokenChain, index: int, parent: Block | None, pages: Sequence[int], provenance: Provenance
    ) -> Block:
        block = Block(
            EntryKind.BLOCK,
            self.block_tokens,
            tuple(pages),
            provenance,
            hash=chain.hashes[index],
            parent=parent,
            index=index,
            ids=array("I", chain.block(index)),
            salt=chain.salt,
            lora=chain.lora,
        )
        self._blocks[block.hash] = block
        self._tally.added(len(block.pages))
        if parent is not None:
            parent.children += 1
            self._queue.leave(parent)
        self._queue.touch(block)
        self._queue.consider(block)
        return block

    def _better(self, provenance: Provenance, held: Entry) -> bool:
        """Whether new bytes should replace those of an entry: they serve more, and nobody reads the old ones."""
        more = not provenance.quality.allows(held.provenance.quality)
        return more and not (held.pins or held.soft)

    def _replace(self, held: Entry, pages: Sequence[int], provenance: Provenance) -> None:
        self.copied(held, False)
        self.pool.drop(held.pages)
        self._tally.added(len(pages) - len(held.pages))
        held.pages, held.provenance = tuple(pages), provenance
        self._queue.touch(held)

    def _remove(self, entry: Entry) -> None:
        self.copied(entry, False)
        self.pool.drop(entry.pages)
        self._tally.removed(entry)
        if isinstance(entry, Snapshot):
            entry.block.snapshot = None
            self._queue.consider(entry.block)
        elif isinstance(entry, Block):
            del self._blocks[entry.hash]
            if entry.parent is not None:
                entry.parent.children -= 1
                self._queue.consider(entry.parent)

    def _pin(self, entry: Entry, firm: bool, by: int) -> None:
        self._tally.pin(entry, firm, by)
        self._queue.consider(entry)


def _may_go(entry: Entry) -> bool:
    """Whether nobody holds it and nothing that is kept needs it."""
    free = not (entry.pins or entry.soft)
    return free and not (isinstance(entry, Block) and (entry.children or entry.snapshot is not None))


def _worth(value: Value, entry: Entry) -> float:
    return value(entry.kind, entry.tokens, len(entry.pages), entry.copied)


def _usable(snapshot: Snapshot | None, quality: Quality) -> bool:
    return snapshot is not None and quality.allows(snapshot.provenance.quality)


def _since_snapshot(block: Block) -> int:
    """Tokens from the snapshot before to the end of ``block``."""
    count, at = 1, block.parent
    while at is not None and at.snapshot is None:
        count, at = count + 1, at.parent
    return count * len(block.ids)
