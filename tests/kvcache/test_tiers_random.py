"""Jobs that keep, read back, hold and leave while tiers copy, fail and are tampered with: no other byte is ever kept.

Threads are replaced by calls that run when a rule says so, in any order that threads could have.
"""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.kept import Provenance
from kvcache.lease import Lease
from kvcache.quality import Quality
from kvcache.threadwork import ThreadWork
from kvcache.tiers.level import Level
from kvcache.tiers.memory import MemoryStore
from kvcache.tiers.places import Threads
from tests.kvcache.test_tiers_failing import Clock, Failing
from tests.kvcache.tiered import PAGE_BYTES, Tiered, ids

prompts = st.lists(st.integers(0, 1), min_size=2, max_size=5)
qualities = st.sampled_from([Quality.EXACT, Quality.EXACT, Quality.NEAR])


class Calls(Executor):
    """Calls that wait until they are told to run."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[object], Callable[[], object]]] = []

    def submit(self, call, /, *args, **named) -> Future:
        future: Future[object] = Future()
        self.waiting.append((future, lambda: call(*args, **named)))
        return future

    def run(self, which: int = 0) -> None:
        while self.waiting:
            future, call = self.waiting.pop(which % len(self.waiting))
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            return


class TieredJobs(RuleBasedStateMachine):
    """Everything runs in one loop, which goes on only where a rule lets it: jobs overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.store, self.clock = Failing(Path(self.directory.name)), Clock()
        self.writer, self.readers = Calls(), Calls()
        levels = [
            Level("memory", MemoryStore(PAGE_BYTES, 10, None), 10 * PAGE_BYTES),
            Level("files", self.store, 24 * 3 * PAGE_BYTES),
        ]
        self.bench = self.run(self._begin(levels))
        self.leases: list[Lease] = []
        self.jobs: list[asyncio.Task[Lease | None]] = []

    async def _begin(self, levels: list[Level]) -> Tiered:
        bench = Tiered(levels, 36, now=self.clock)
        bench.tiers._places.threads = Threads(ThreadWork(self.writer), ThreadWork(self.readers))
        bench.tiers.start()
        return bench

    def run(self, work):
        return self.loop.run_until_complete(work)

    @rule(parts=prompts, quality=qualities)
    def keep(self, parts: list[int], quality: Quality) -> None:
        self.run(self._keep(parts, quality))

    async def _keep(self, parts: list[int], quality: Quality) -> None:
        self.bench.keep(ids(*parts), Provenance(quality, (), "here"))

    @rule(parts=prompts, quality=qualities, resume=st.booleans(), needed=st.booleans())
    def bring(self, parts: list[int], quality: Quality, resume: bool, needed: bool) -> None:
        work = self.bench.bring(ids(*parts), quality, resume, needed=needed)
        self.jobs.append(self.loop.create_task(work))

    @rule(parts=prompts, harmed=st.booleans())
    def keep_and_bring_later(self, parts: list[int], harmed: bool) -> None:
        """The whole way down and back, with time for it, and perhaps with every file altered in between."""
        self.keep(parts, Quality.EXACT)
        self.fail(0, 0)
        self.go_on(1000.0, 20, [])
        self.evict(36)
        for which in range(30 if harmed else 0):
            self.harm(which, which, cut=False)
        self.bring(parts, Quality.EXACT, resume=True, needed=True)
        self.go_on(0.0, 9, [0] * 9)

    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        if self.jobs:
            self.jobs[which % len(self.jobs)].cancel()

    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        if self.leases:
            self.leases.pop(which % len(self.leases)).release()

    @rule(pages=st.integers(1, 36))
    def evict(self, pages: int) -> None:
        self.run(self._evict(pages))

    async def _evict(self, pages: int) -> None:
        self.bench.cache.evict(min(pages, self.bench.cache.evictable_pages))

    @rule(seconds=st.sampled_from([0.0, 0.0, 10.0]), writes=st.integers(0, 9), reads=st.lists(st.integers(0, 9)))
    def go_on(self, seconds: float, writes: int, reads: list[int]) -> None:
        self.clock.now += seconds
        for _ in range(writes):
            self.writer.run()
            self.run(self._turns())
        for which in reads:
            self.readers.run(which)
            self.run(self._turns())
        for job in [job for job in self.jobs if job.done()]:
            self.jobs.remove(job)
            if not job.cancelled() and (lease := job.result()) is not None:
                self.leases.append(lease)

    async def _turns(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    @rule(writes=st.sampled_from([0, 0, errno.ENOSPC, errno.EIO]), reads=st.sampled_from([0, 0, 0, errno.EIO]))
    def fail(self, writes: int, reads: int) -> None:
        self.store.writes, self.store.reads = writes, reads

    @rule(which=st.integers(0, 99), at=st.integers(0, 2 * PAGE_BYTES - 1), cut=st.booleans())
    def harm(self, which: int, at: int, cut: bool) -> None:
        found = sorted(path for path in Path(self.directory.name).rglob("*.*") if path.suffix != ".part")
        if not found:
            return
        path = found[which % len(found)]
        try:
            data = bytearray(path.read_bytes())
            data[PAGE_BYTES + at] ^= 1
            path.write_bytes(data[: PAGE_BYTES + at] if cut else data)
        except (FileNotFoundError, IndexError):
            pass  # it went just now

    @invariant()
    def all_is_what_it_is_kept_as(self) -> None:
        self.bench.check()
        held = {page for lease in self.leases if not lease.gone for block in lease.blocks for page in block}
        assert held <= self.bench.pages.kept_pages

    def teardown(self) -> None:
        while self.writer.waiting or self.readers.waiting:
            self.go_on(0.0, len(self.writer.waiting), [0] * len(self.readers.waiting))
        for lease in self.leases:
            lease.release()
        self.run(self._end())
        assert not list(Path(self.directory.name).rglob("*.*"))
        self.loop.close()
        self.directory.cleanup()

    async def _end(self) -> None:
        for job in self.jobs:
            job.cancel()
        for done in await asyncio.gather(*self.jobs, return_exceptions=True):
            if isinstance(done, Lease):
                done.release()
        await self.bench.tiers.close(keep=False)
        self.bench.check_bytes()
        self.bench.cache.check_integrity()
        assert self.bench.pages.owners == {}
        assert self.bench.cache.figures.pinned_pages == 0
        self.bench.pool.close()


TestTieredJobs = TieredJobs.TestCase
TestTieredJobs.settings = settings(max_examples=10, stateful_step_count=25, deadline=None, derandomize=True)
