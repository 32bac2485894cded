"""Threads that work on a job's memory are waited for, whatever became of their callers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from kvcache.threadwork import ThreadWork


async def test_settle_waits_for_a_thread_whose_caller_was_cancelled() -> None:
    release, done = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(5)
        done.set()

    with ThreadPoolExecutor(1) as executor:
        threads = ThreadWork(executor)
        call = threads.start(work)
        await asyncio.sleep(0.02)
        call.cancel()
        settling = asyncio.create_task(threads.settle())
        await asyncio.sleep(0.02)
        assert not settling.done()
        release.set()
        await settling
        assert done.is_set()


async def test_calls_that_have_not_begun_are_dropped() -> None:
    release, ran = threading.Event(), []
    with ThreadPoolExecutor(1) as executor:
        threads = ThreadWork(executor)
        threads.start(release.wait, 5)
        later = threads.start(ran.append, "later")
        settling = asyncio.create_task(threads.settle())
        await asyncio.sleep(0.02)
        release.set()
        await settling
        assert later.cancelled()
    assert ran == []


async def test_results_and_errors_reach_the_caller() -> None:
    with ThreadPoolExecutor(1) as executor:
        threads = ThreadWork(executor)
        assert await threads.start(divmod, 7, 3) == (2, 1)
        failed = await asyncio.gather(threads.start(divmod, 7, 0), return_exceptions=True)
        assert isinstance(failed[0], ZeroDivisionError)
        await threads.settle()
