"""What is kept, matched, leased and evicted, by hand and at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvcache.blocks import PagePool, PoolFull
from kvcache.chain import TokenChain
from kvcache.kept import EntryKind, Provenance, StoredBlock
from kvcache.lease import Lease
from kvcache.prefix_cache import Match, PrefixCache
from kvcache.quality import Quality

BLOCK = 4
BLOCK_PAGES = 2
SNAPSHOT_PAGES = 3
EXACT, NEAR = Provenance(), Provenance(Quality.NEAR, ("int8",))


class Ear:
    """A listener that rebuilds what the cache holds from what it is told."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, StoredBlock] = {}
        self.snapshots: dict[bytes, Quality] = {}
        self.told = 0

    def stored(self, blocks: Sequence[StoredBlock]) -> None:
        for block in blocks:
            assert block.parent is None or block.parent in self.blocks, "parents come first"
            self.blocks[block.hash] = block
            self.told += 1

    def snapshot(self, hash: bytes, quality: Quality) -> None:
        assert hash in self.blocks
        self.snapshots[hash] = quality

    def removed(self, hashes: Sequence[bytes], kind: EntryKind) -> None:
        for name in hashes:
            if kind is EntryKind.SNAPSHOT:
                del self.snapshots[name]
            else:
                assert name not in self.snapshots
                del self.blocks[name]


class Bench:
    """A cache, its pool, and prompts to keep."""

    def __init__(self, pages: int = 100, snapshots: bool = True, **more: object) -> None:
        self.ear = Ear()
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, BLOCK, snapshots=snapshots, listener=self.ear, **more)  # type: ignore[arg-type]

    def chain(self, tokens: Sequence[int]) -> TokenChain:
        return TokenChain.of(tokens, BLOCK, fingerprint="f", salt="s")

    def keep(
        self, tokens: Sequence[int], *snapshots: int, provenance: Provenance = EXACT, first: int = 0
    ) -> TokenChain:
        """Keep all full blocks of ``tokens`` from ``first`` on, and snapshots at these positions."""
        chain = self.chain(tokens)
        count = len(chain.hashes) - first
        pages = self.pool.allocate("job", count * BLOCK_PAGES + len(snapshots) * SNAPSHOT_PAGES)
        blocks = [pages[n * BLOCK_PAGES : (n + 1) * BLOCK_PAGES] for n in range(count)]
        self.cache.keep("job", chain, first, blocks, provenance)
        rest = pages[count * BLOCK_PAGES :]
        for n, at in enumerate(snapshots):
            self.cache.keep_snapshot("job", chain, at, rest[n * SNAPSHOT_PAGES : (n + 1) * SNAPSHOT_PAGES], provenance)
        self.pool.release("job")
        self.cache.check_integrity()
        return chain

    def match(self, tokens: Sequence[int], quality: Quality = Quality.EXACT) -> Match:
        return self.cache.match(self.chain(tokens).hashes, quality)


def ids(*parts: int) -> list[int]:
    """One block of equal tokens for each part."""
    return [part for part in parts for _ in range(BLOCK)]


def test_the_longest_common_prefix_of_full_blocks_matches() -> None:
    bench = Bench(snapshots=False)
    bench.keep([*ids(1, 2, 3), 9])
    assert bench.match(ids(1, 2, 3, 4)) == Match(12, 12)
    assert bench.match([*ids(1, 2), 3, 3]) == Match(8, 8)
    assert bench.match(ids(2, 3)) == Match(0, 0)


def test_a_salt_of_its_own_shares_nothing() -> None:
    bench = Bench(snapshots=False)
    bench.keep(ids(1, 2))
    other = TokenChain.of(ids(1, 2), BLOCK, fingerprint="f", salt="another")
    assert bench.cache.match(other.hashes, Quality.EXACT) == Match(0, 0)


def test_a_model_with_windows_or_states_resumes_only_at_snapshots() -> None:
    bench = Bench()
    bench.keep(ids(1, 2, 3, 4), 8)
    assert bench.match(ids(1, 2, 3)) == Match(12, 8)
    assert bench.match(ids(1)) == Match(4, 0)
    chain = bench.chain(ids(1, 2, 3))
    assert bench.cache.lease(chain.hashes, 12, Quality.EXACT, resume=True) is None
    held = bench.cache.lease(chain.hashes, 12, Quality.EXACT, resume=False)
    assert held is not None
    assert (len(held.blocks), held.snapshot) == (3, ())
    resumed = bench.cache.lease(chain.hashes, 8, Quality.EXACT, resume=True)
    assert resumed is not None
    assert (len(resumed.blocks), len(resumed.snapshot)) == (2, SNAPSHOT_PAGES)


def test_an_exact_request_matches_nothing_behind_an_inexact_block() -> None:
    bench = Bench()
    bench.keep(ids(1), 4)
    bench.keep(ids(1, 2, 3), 12, provenance=NEAR)
    assert bench.match(ids(1, 2, 3)) == Match(4, 4)
    assert bench.match(ids(1, 2, 3), Quality.NEAR) == Match(12, 12)
    near = bench.cache.lease(bench.chain(ids(1, 2, 3)).hashes, 12, Quality.NEAR, resume=True)
    assert near is not None
    assert near.quality is Quality.NEAR


def test_an_inexact_snapshot_is_not_resumed_from_exactly() -> None:
    bench = Bench()
    chain = bench.keep(ids(1, 2))
    pages = bench.pool.allocate("job", SNAPSHOT_PAGES)
    assert bench.cache.keep_snapshot("job", chain, 8, pages, NEAR)
    assert bench.match(ids(1, 2)) == Match(8, 0)
    assert bench.match(ids(1, 2), Quality.NEAR) == Match(8, 8)


def test_exact_bytes_replace_inexact_ones_unless_somebody_reads_those() -> None:
    bench = Bench(snapshots=False)
    chain = bench.keep(ids(1, 2), provenance=NEAR)
    lease = bench.cache.lease(chain.hashes, 4, Quality.NEAR, resume=False)
    assert lease is not None
    bench.keep(ids(1, 2))
    assert bench.match(ids(1, 2)) == Match(0, 0)
    lease.release()
    bench.keep(ids(1, 2))
    assert bench.match(ids(1, 2)) == Match(8, 8)
    assert {block.quality for block in bench.ear.blocks.values()} == {Quality.EXACT}
    bench.keep(ids(1, 2), provenance=NEAR)
    assert bench.match(ids(1, 2)) == Match(8, 8)


def test_a_block_that_is_here_already_takes_no_second_page() -> None:
    bench = Bench()
    bench.keep(ids(1, 2), 8)
    free = bench.pool.free_pages
    bench.keep(ids(1, 2), 8)
    assert bench.pool.free_pages == free
    assert bench.ear.told == 2


def test_a_block_without_its_parent_is_not_kept() -> None:
    bench = Bench()
    bench.keep(ids(1, 2, 3), first=1)
    assert bench.pool.free_pages == bench.pool.capacity


def test_eviction_takes_the_least_recently_used_prompt_leaf_by_leaf() -> None:
    bench = Bench(pages=8, snapshots=False)
    old, new = bench.keep(ids(1, 2)), bench.keep(ids(3, 4))
    bench.cache.evict(BLOCK_PAGES)
    assert bench.match(ids(1, 2)) == Match(4, 4)
    lease = bench.cache.lease(old.hashes, 4, Quality.EXACT, resume=True)
    assert lease is not None
    lease.release()
    bench.cache.evict(2 * BLOCK_PAGES)
    assert (bench.match(ids(1, 2)), bench.match(ids(3, 4))) == (Match(4, 4), Match(0, 0))
    assert list(bench.ear.blocks) == [old.hashes[0]]
    assert new.hashes[0] not in bench.ear.blocks


def test_a_snapshot_goes_before_its_block_and_alone_where_it_is_worth_less() -> None:
    bench = Bench(value=lambda kind, tokens, pages, copied: float(kind is EntryKind.BLOCK))
    bench.keep(ids(1, 2), 8)
    bench.cache.evict(1)
    assert bench.match(ids(1, 2)) == Match(8, 0)
    assert bench.ear.snapshots == {}


def test_a_snapshot_is_worth_the_tokens_since_the_one_before() -> None:
    seen: list[tuple[EntryKind, int, int]] = []

    def value(kind: EntryKind, tokens: int, pages: int, copied: bool) -> float:
        seen.append((kind, tokens, pages))
        return 0.0

    bench = Bench(value=value)
    bench.keep(ids(1, 2, 3, 4), 4, 16)
    found = [each for each in seen if each[0] is EntryKind.SNAPSHOT]
    assert found == [(EntryKind.SNAPSHOT, 4, SNAPSHOT_PAGES), (EntryKind.SNAPSHOT, 12, SNAPSHOT_PAGES)]


def test_what_a_firm_lease_holds_is_never_evicted() -> None:
    bench = Bench(pages=8, snapshots=False)
    chain = bench.keep(ids(1, 2, 3, 4))
    lease = bench.cache.lease(chain.hashes, 8, Quality.EXACT, resume=True)
    assert lease is not None
    assert bench.cache.evictable_pages == 4
    with pytest.raises(PoolFull, match="5 pages asked for, 4 kept ones"):
        bench.cache.evict(5)
    bench.cache.evict(4)
    assert bench.match(ids(1, 2, 3, 4)) == Match(8, 8)
    lease.release()
    lease.release()
    assert bench.cache.evictable_pages == 4
    bench.cache.check_integrity()


def test_soft_leases_are_revoked_last_and_the_newest_first() -> None:
    bench = Bench(pages=12, snapshots=False)
    revoked: list[str] = []
    chains = {name: bench.keep(ids(n, n)) for n, name in enumerate("abc")}
    leases = {
        name: bench.cache.lease(
            chains[name].hashes, 8, Quality.EXACT, resume=False, revoked=lambda n=name: revoked.append(n)
        )
        for name in "ab"
    }
    assert (bench.cache.idle_pages, bench.cache.evictable_pages) == (4, 12)
    bench.cache.evict(4)
    assert revoked == []
    bench.cache.evict(1)
    assert revoked == ["b"]
    a, b = leases["a"], leases["b"]
    assert a is not None
    assert b is not None
    assert b.gone
    assert not b.firm()
    assert a.firm()
    assert bench.cache.evictable_pages == 2
    assert a.soften()
    assert bench.cache.evictable_pages == 6
    a.release()
    bench.cache.check_integrity()


def test_a_used_entry_outlives_an_unused_one_of_more_worth_in_time() -> None:
    bench = Bench(pages=1000, snapshots=False)
    cheap = bench.keep(ids(1))
    for n in range(2, 50):
        bench.keep(ids(n))
        lease = bench.cache.lease(cheap.hashes, 4, Quality.EXACT, resume=False)
        assert lease is not None
        lease.release()
        bench.cache.evict(1)
    assert bench.match(ids(1)) == Match(4, 4)


@pytest.mark.parametrize("seed", range(12))
def test_no_page_is_lost_and_no_leased_byte_goes_whatever_happens(seed: int) -> None:
    source = random.Random(seed)
    bench = Bench(pages=60, snapshots=seed % 3 > 0)
    leases: list[Lease] = []
    gone: set[int] = set()
    for step in range(400):
        tokens = ids(*(source.randrange(3) for _ in range(source.randrange(1, 9))))
        chain = bench.chain(tokens)
        quality = source.choice([Quality.EXACT, Quality.EXACT, Quality.NEAR])
        match source.randrange(5):
            case 0 | 1:
                need = len(chain.hashes) * BLOCK_PAGES + SNAPSHOT_PAGES
                short = need - bench.pool.free_pages
                if short > bench.cache.evictable_pages:
                    with pytest.raises(PoolFull):
                        bench.cache.evict(short)
                    continue
                if short > 0:
                    bench.cache.evict(short)
                bench.keep(tokens, len(tokens), provenance=Provenance(quality))
            case 2:
                found = bench.cache.match(chain.hashes, quality)
                resume = source.random() < 0.5
                at = found.resumable if resume else found.held
                key = len(gone) + step * 1000
                soft = source.random() < 0.5
                lease = bench.cache.lease(
                    chain.hashes, at, quality, resume=resume, revoked=(lambda k=key: gone.add(k)) if soft else None
                )
                assert lease is not None
                assert quality.allows(lease.quality)
                leases.append(lease)
            case 3 if leases:
                leases.pop(source.randrange(len(leases))).release()
            case 4:
                bench.cache.evict(source.randrange(bench.cache.evictable_pages + 1))
        held = {page for lease in leases if not lease.gone for block in lease.blocks for page in block}
        held |= {page for lease in leases if not lease.gone for page in lease.snapshot}
        assert held <= bench.pool.kept_pages
        bench.cache.check_integrity()
        assert {b.hash for b in bench.cache.stored()} == bench.ear.blocks.keys()
        assert dict(bench.cache.stored_snapshots()) == bench.ear.snapshots
    for lease in leases:
        lease.release()
    bench.cache.evict(bench.cache.evictable_pages)
    assert bench.pool.free_pages == bench.pool.capacity
    assert (bench.ear.blocks, bench.ear.snapshots) == ({}, {})
