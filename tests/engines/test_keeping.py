"""What a prefill should offer, and what becomes of the offers of a job."""

from __future__ import annotations

import pytest

from engines.keeping import JobKeeper, checkpoints
from engines.protocol import Checkpoint, Offered, StoreCommand, Stored
from kvcache.blocks import PageGeometry, PagePool
from kvcache.chain import TokenChain
from kvcache.checkpoints import CheckpointPolicy
from kvcache.kept import Provenance
from kvcache.layout import KVLayout
from kvcache.prefix_cache import Match, PrefixCache
from kvcache.quality import Quality
from kvcache.room import PageRoom
from kvcache.tables import block_pages
from tests.pair import GEOMETRY, LAYOUT

PLAIN = PageGeometry.of(KVLayout(LAYOUT.groups[:1]))
EVERY_256 = CheckpointPolicy(256)


@pytest.mark.parametrize(
    ("begin", "exported", "stop", "wanted"),
    [
        (0, 0, 700, [(256, 256), (512, 512), (640, 640)]),
        (0, None, 700, [(0, 256), (256, 512), (512, 640)]),
        (640, 320, 700, []),
        (320, 0, 640, [(512, 512)]),
        (320, None, 640, [(320, 512), (512, 640)]),
        (64, 320, 700, [(64, 256), (256, 320, False), (512, 512), (640, 640)]),
        (256, 512, 700, [(256, 512), (640, 640)]),
        (0, 0, 63, []),
    ],
)
def test_all_that_is_not_exported_is_offered_and_a_snapshot_at_every_checkpoint(
    begin: int, exported: int | None, stop: int, wanted: list[tuple[int, ...]]
) -> None:
    found = checkpoints(GEOMETRY, EVERY_256, begin, exported, stop)
    assert found == tuple(Checkpoint(*each) for each in wanted)


def test_without_windows_and_states_only_blocks_are_offered() -> None:
    assert checkpoints(PLAIN, EVERY_256, 64, 320, 700) == (Checkpoint(64, 320, snapshot=False),)
    assert checkpoints(PLAIN, EVERY_256, 64, None, 700) == (Checkpoint(64, 640, snapshot=False),)
    assert checkpoints(PLAIN, EVERY_256, 320, 64, 700) == ()


def test_an_interval_of_nothing_leaves_the_end_alone() -> None:
    assert list(CheckpointPolicy(0).positions(0, 700, 64)) == [640]
    assert list(CheckpointPolicy(128).positions(256, 520, 64)) == [384, 512]


class Run:
    """An engine's job that remembers how its offers were answered."""

    def __init__(self) -> None:
        self.answers: list[StoreCommand] = []

    def store(self, command: StoreCommand) -> None:
        self.answers.append(command)


class Bench:
    """A keeper, its room and its job's lease."""

    def __init__(self, pages: int = 200, exports: bool = False) -> None:
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, 64, snapshots=True)
        self.room = PageRoom(self.pool, cache=self.cache)
        self.chain = TokenChain.of(range(400), 64, fingerprint="f", salt="")
        lease = self.cache.lease((), 0, Quality.EXACT, resume=True)
        assert lease is not None
        self.lease = lease
        self.keeper = JobKeeper(self.room, GEOMETRY, "job", self.chain, lease, Provenance(), exports=exports)
        self.run = Run()

    def offer(self, start: int, stop: int, written: bool = True) -> bool:
        """Offer, and write what is taken; whether it was."""
        self.keeper.offered(Offered("job", start, stop, True), self.run)  # type: ignore[arg-type]
        taken = bool(self.run.answers[-1].pages)
        self.keeper.stored(Stored("job", stop, taken and written))
        return taken

    @property
    def match(self) -> Match:
        return self.cache.match(self.chain.hashes, Quality.EXACT)

    def end(self) -> None:
        self.keeper.close()
        self.lease.release()
        self.room.release("job")
        assert self.pool.owners == {}
        assert self.cache.figures.pinned_pages == 0
        self.cache.check_integrity()


def test_offers_in_order_make_a_prefix() -> None:
    bench = Bench()
    assert bench.offer(0, 128)
    assert bench.offer(128, 192)
    assert bench.match == Match(192, 192)
    bench.end()


def test_an_offer_behind_a_gap_is_declined() -> None:
    bench = Bench()
    assert not bench.offer(64, 128)
    bench.end()


def test_an_offer_of_more_than_is_known_of_the_prompt_is_declined() -> None:
    bench = Bench()
    assert not bench.offer(0, 448), "its chain has 400 tokens"
    bench.end()


def test_a_snapshot_of_what_the_export_will_bring_waits_for_it() -> None:
    bench = Bench(exports=True)
    assert bench.offer(128, 128)
    assert bench.match == Match(0, 0)
    table = GEOMETRY.table(0, 300, bench.pool.allocate("job", GEOMETRY.pages_for(0, 300)))
    bench.keeper.keep_table(table, 128, done=False)
    assert bench.match == Match(128, 128)
    bench.end()


def test_what_the_job_still_reads_stays_until_it_ends() -> None:
    bench = Bench()
    table = GEOMETRY.table(0, 256, bench.pool.allocate("job", GEOMETRY.pages_for(0, 256)))
    bench.keeper.keep_table(table, 256, done=False)
    assert bench.match == Match(256, 0), "the windows and states at its end are the job's own until it is done"
    assert bench.cache.evictable_pages == 0
    bench.keeper.keep_table(table, 256, done=True)
    assert bench.match == Match(256, 256)
    bench.end()


def test_blocks_that_follow_on_those_of_another_job_hold_these_too() -> None:
    bench = Bench(exports=True)
    before = GEOMETRY.blocks_only.table(0, 128, bench.pool.allocate("other", GEOMETRY.blocks_only.pages_for(0, 128)))
    bench.cache.keep("other", bench.chain, 0, block_pages(before, 0, 2), Provenance())
    bench.pool.release("other")
    table = GEOMETRY.table(128, 256, bench.pool.allocate("job", GEOMETRY.pages_for(128, 256)))
    bench.keeper.keep_table(table, 256, done=False)
    bench.cache.check_integrity()
    assert bench.cache.evictable_pages == 0, "none of them can go before the last one does"
    bench.end()
    assert bench.cache.evictable_pages == bench.cache.figures.pages


def test_an_offer_that_was_not_written_is_not_kept() -> None:
    bench = Bench()
    assert bench.offer(0, 64, written=False)
    assert bench.match == Match(0, 0)
    assert bench.pool.free_pages == bench.pool.capacity
    bench.end()


def test_an_offer_takes_no_page_that_somebody_waits_for_or_holds() -> None:
    bench = Bench(pages=GEOMETRY.pages_for(0, 64))
    bench.pool.allocate("another", 1)
    assert not bench.offer(0, 64)
    bench.room.release("another")
    assert bench.offer(0, 64)
    bench.end()


def test_a_job_that_ends_in_the_middle_of_an_offer_gives_its_pages_back() -> None:
    bench = Bench()
    bench.keeper.offered(Offered("job", 0, 64, True), bench.run)  # type: ignore[arg-type]
    bench.end()
    assert bench.pool.free_pages == bench.pool.capacity
