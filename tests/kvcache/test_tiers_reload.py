"""What the pool lets go of comes back byte by byte, or not at all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kvcache.chain import TokenChain
from kvcache.kept import EntryKind, Provenance
from kvcache.prefix_cache import Match
from kvcache.quality import Quality
from kvcache.tiers.files import FileStore
from kvcache.tiers.level import Level
from kvcache.tiers.memory import MemoryStore
from tests.kvcache.tiered import BLOCK, PAGE_BYTES, Tiered, files, ids, tiered

NEAR = Provenance(Quality.NEAR, ("int8",), "there")


def all_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "lock")


async def test_a_prompt_that_was_evicted_comes_back_as_it_was(tmp_path: Path) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6)
        bench.keep(prompt)
        bench.keep(ids(7, 8, 9))
        await bench.copied()
        bench.evict_all()
        assert bench.match(prompt) == Match(0, 0)
        bench.check()
        lease = await bench.bring(prompt)
        assert lease is not None
        assert bench.match(prompt) == Match(24, 24)
        assert bench.cache.entry(bench.chain(prompt).hashes[-1], EntryKind.SNAPSHOT).provenance.origin == "here"
        lease.release()
        bench.check()
        (report,) = bench.tiers.reports
        assert (report.reloads, report.hits, report.hit_tokens, report.damaged) == (7, 1, 24, 0)


async def test_what_is_read_back_needs_no_second_copy(tmp_path: Path) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        bench.keep(prompt)
        await bench.copied()
        bench.evict_all()
        (await bench.bring(prompt)).release()
        spills = bench.tiers.reports[0].spills
        bench.evict_all()
        (await bench.bring(prompt)).release()
        assert bench.tiers.reports[0].spills == spills


async def test_only_what_the_pool_lacks_is_read(tmp_path: Path) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7)
        bench.keep(prompt)
        await bench.copied()
        lease = bench.cache.lease(bench.chain(prompt).hashes, 16, Quality.EXACT, resume=False)
        bench.evict_all()
        assert bench.match(prompt) == Match(16, 0)
        (await bench.bring(prompt)).release()
        assert bench.tiers.reports[0].reloads == 4
        lease.release()
        bench.check()


async def test_an_exact_request_gets_nothing_back_that_is_not(tmp_path: Path) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        bench.keep(prompt, NEAR)
        await bench.copied()
        bench.evict_all()
        assert await bench.bring(prompt) is None
        lease = await bench.bring(prompt, Quality.NEAR)
        assert lease.quality is Quality.NEAR
        assert bench.cache.entry(bench.chain(prompt).hashes[0], EntryKind.BLOCK).provenance == NEAR
        lease.release()
        bench.check()


async def test_what_is_not_exact_is_not_taken_for_exact_after_a_restart(tmp_path: Path) -> None:
    prompt = ids(1, 2, 3, 4)
    async with tiered(files(tmp_path), keep=True) as bench:
        bench.keep(prompt, NEAR)
        await bench.copied()
    async with tiered(files(tmp_path)) as bench:
        assert bench.tiers.reports[0].entries == 5
        assert await bench.bring(prompt, needed=True) is None
        (await bench.bring(prompt, Quality.NEAR)).release()
        assert bench.match(prompt) == Match(0, 0)
        assert bench.match(prompt, Quality.NEAR) == Match(16, 16)
        bench.check()


async def test_another_tenants_prompt_is_not_found_below(tmp_path: Path) -> None:
    prompt = ids(1, 2, 3, 4)
    async with tiered(files(tmp_path)) as bench:
        bench.keep(prompt)
        await bench.copied()
        bench.evict_all()
        deadline = asyncio.get_running_loop().time() + 5
        for salt, lora in (("another", ""), ("tenant", "adapter"), ("", "")):
            chain = TokenChain.of(prompt, BLOCK, fingerprint="model", salt=salt, lora=lora)
            assert await bench.tiers.bring(chain, 16, Quality.EXACT, deadline, resume=False, needed=True) is None
        assert bench.tiers.reports[0].reloads == 0


async def test_exact_bytes_take_the_place_of_inexact_ones_below(tmp_path: Path) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        bench.keep(prompt, NEAR)
        await bench.copied()
        bench.evict_all()
        bench.keep(prompt)
        await bench.copied()
        bench.evict_all()
        (await bench.bring(prompt)).release()
        assert bench.match(prompt) == Match(32, 32)
        bench.check()


@pytest.mark.parametrize("harm", ["flip", "truncate", "lengthen", "remove", "swap"])
async def test_an_altered_file_is_never_served_and_goes(tmp_path: Path, harm: str) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        chain = bench.keep(prompt)
        await bench.copied()
        bench.evict_all()
        names = [path for path in all_files(tmp_path) if path.suffix == ".block"]
        path = next(path for path in names if path.stem == chain.hashes[2].hex())
        data = bytearray(path.read_bytes())
        match harm:
            case "flip":
                data[-100] ^= 1
                path.write_bytes(data)
            case "truncate":
                path.write_bytes(data[:-PAGE_BYTES])
            case "lengthen":
                path.write_bytes(data + bytes(PAGE_BYTES))
            case "remove":
                path.unlink()
            case "swap":
                path.write_bytes(next(other for other in names if other != path).read_bytes())
        lease = await bench.bring(prompt)
        assert lease is None
        assert bench.match(prompt) == Match(8, 0)
        assert bench.tiers.reports[0].damaged == 1
        assert bench.tiers._index.get(chain.hashes[2], EntryKind.BLOCK) is None
        await asyncio.sleep(0.05)
        assert not path.exists()
        bench.check()


async def test_of_jobs_that_want_the_same_one_reads(tmp_path: Path) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        bench.keep(prompt)
        await bench.copied()
        bench.evict_all()
        leases = await asyncio.gather(*(bench.bring(prompt) for _ in range(5)))
        assert bench.tiers.reports[0].reloads == 9
        for lease in leases:
            assert lease.tokens == 32
            lease.release()
        bench.check()


async def test_a_job_that_leaves_takes_nothing_with_it(tmp_path: Path) -> None:
    store = HeldStore(tmp_path)
    async with tiered(Level("disk", store, 1 << 20)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        bench.keep(prompt)
        await bench.copied()
        bench.evict_all()
        store.gate.clear()
        job = asyncio.create_task(bench.bring(prompt))
        await asyncio.to_thread(store.asked.wait, 5)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert list(bench.pages.owners) == ["reload:1"]
        bench.evict_all()
        assert bench.keep(ids(9)) is not None
        store.gate.set()
        async with asyncio.timeout(5):
            while bench.pages.owners:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert bench.match(prompt) == Match(32, 32)
        bench.check()


async def test_a_reload_takes_no_room_from_jobs(tmp_path: Path) -> None:
    async with tiered(files(tmp_path)) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        bench.keep(prompt)
        await bench.copied()
        bench.room.take("a job", 30)
        assert bench.match(prompt).resumable == 0
        assert await bench.bring(prompt) is None
        assert bench.pages.owners == {"a job": 30}
        assert bench.tiers._reloader.no_room == 1
        bench.room.release("a job")


async def test_reading_that_costs_more_than_computing_is_left_unless_it_is_needed(tmp_path: Path) -> None:
    async with tiered(files(tmp_path), rate=1e9) as bench:
        prompt = ids(1, 2, 3, 4, 5, 6, 7, 8)
        bench.keep(prompt)
        await bench.copied()
        bench.evict_all()
        (await bench.bring(prompt)).release()  # nobody knows yet how fast the tier is
        bench.evict_all()
        assert await bench.bring(prompt) is None
        assert bench.match(prompt) == Match(0, 0)
        lease = await bench.bring(prompt, resume=False, needed=True)
        assert lease.tokens == 32
        lease.release()


async def test_what_memory_below_has_no_room_for_sinks_into_files(tmp_path: Path) -> None:
    memory = Level("cxl", MemoryStore(PAGE_BYTES, 12, None), 12 * PAGE_BYTES)
    async with tiered(memory, files(tmp_path)) as bench:
        prompts = [ids(n, n, n, n, n) for n in range(8)]
        for prompt in prompts:
            bench.keep(prompt)
            await bench.copied()
            bench.check()
        bench.evict_all()
        bench.check()
        upper, lower = bench.tiers.reports
        assert upper.entries
        assert lower.entries
        assert upper.drops == lower.drops == 0
        for prompt in prompts[-3:]:
            (await bench.bring(prompt)).release()
            assert bench.match(prompt) == Match(20, 20)
        bench.check()


async def test_a_full_tier_lets_go_of_what_is_least_worth_and_of_no_beginning_first(tmp_path: Path) -> None:
    async with tiered(files(tmp_path, mib=0.25)) as bench:
        for n in range(12):
            bench.keep(ids(99, n, n, n, n))
            await bench.copied()
        bench.evict_all()
        (report,) = bench.tiers.reports
        assert report.drops > 0
        assert report.used_bytes <= report.capacity_bytes
        lease = await bench.bring(ids(99, 11, 11, 11, 11))
        assert lease.tokens == 20
        lease.release()
        assert await bench.bring(ids(99, 0, 0, 0, 0)) is None
        bench.check()


async def test_half_of_the_pool_is_always_free_or_copied_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    async with tiered(files(tmp_path), safe_share=0.5) as bench:
        bench.keep(ids(1, 2, 3))
        await asyncio.sleep(0.05)
        assert bench.tiers.reports[0].spills == 0
        bench.keep(ids(4, 5, 6, 7, 8, 9))
        await bench.copied()
        assert bench.pages.free_pages + bench.cache.copied_pages >= 20
        assert 0 < bench.tiers.reports[0].entries < 8


async def test_what_goes_while_it_is_copied_is_not_taken_for_copied(tmp_path: Path) -> None:
    store = HeldStore(tmp_path)
    async with tiered(Level("disk", store, 1 << 20)) as bench:
        store.gate.clear()
        bench.keep(ids(1, 2, 3, 4, 5, 6, 7, 8))
        await asyncio.to_thread(store.asked.wait, 5)
        bench.evict_all()
        for page in bench.room.take("another", bench.pages.capacity):
            bench.page(page)[:] = bytes(PAGE_BYTES)
        store.gate.set()
        await asyncio.sleep(0.1)
        assert list(bench.tiers._index) == []
        assert all_files(tmp_path) == []
        bench.room.release("another")


class HeldStore(FileStore):
    """Files whose reads and writes wait for ``gate``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate, self.asked = threading.Event(), threading.Event()
        self.gate.set()

    def put(self, image, pages) -> None:
        self._wait()
        super().put(image, pages)

    def get(self, key, pages) -> None:
        self._wait()
        super().get(key, pages)

    def _wait(self) -> None:
        if not self.gate.is_set():
            self.asked.set()
            self.gate.wait(5)


def test_the_bench_notices_other_bytes(tmp_path: Path) -> None:
    bench = Tiered([files(tmp_path)], 40)
    bench.keep(ids(1))
    bench.page(bench.cache.entry(bench.chain(ids(1)).hashes[0], EntryKind.BLOCK).pages[1])[7] ^= 1
    with pytest.raises(AssertionError, match="other bytes"):
        bench.check_bytes()
    bench.pool.close()
