"""Small pools: who has no room waits, nobody waits for ever, and no side pins memory that it cannot use yet."""

import pytest

from kvcache.control import Failed, Finished
from tests.pair import GEOMETRY, pair
from tests.stages import reach, release

TOKENS = 400
ONE = GEOMETRY.pages_for(0, TOKENS - 1)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize(
    ("prefill_pages", "decode_pages"), [(ONE * 3 // 2, ONE * 3 // 2), (ONE, ONE * 8), (ONE * 8, ONE)]
)
async def test_twenty_transfers_all_finish_in_pools_for_one_and_a_half(tokenizer, codec, prefill_pages, decode_pages):
    async with pair(tokenizer, prefill_pages=prefill_pages, decode_pages=decode_pages) as nodes:
        jobs = [nodes.job(TOKENS, codec=codec) for _ in range(20)]
        for job in jobs:
            nodes.start(job)
        for job in jobs:
            assert isinstance(await nodes.decode.ended(job.generation, 30.0), Finished)


async def test_small_transfers_do_not_starve_a_large_one(tokenizer):
    async with pair(tokenizer, prefill_pages=ONE + 4, decode_pages=ONE + 4) as nodes:
        jobs = [nodes.job(20) for _ in range(5)] + [nodes.job(TOKENS)] + [nodes.job(20) for _ in range(10)]
        for job in jobs:
            nodes.start(job)
        for job in jobs:
            assert isinstance(await nodes.decode.ended(job.generation, 30.0), Finished)


async def test_a_job_that_waits_remotely_pins_no_decode_memory(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, "queued")
        assert nodes.decode.pages.owners == {}
        release(nodes)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_nothing_is_sent_before_the_grant_where_there_was_no_room_when_it_was_asked_for(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, "granting")
        await nodes.prefill.until(lambda: nodes.prefill.engine.prefilled)
        assert nodes.prefill.serving._exports[job.ticket.transfer]._outgoing.sent == 0
        release(nodes)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_a_transfer_that_can_never_fit_is_refused_at_once(tokenizer):
    async with pair(tokenizer, prefill_pages=ONE - 1, decode_pages=ONE - 1) as nodes:
        job = nodes.job(TOKENS)
        nodes.start(job)
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("queue", "too_large")
        assert "--pool-mib" in failed.detail
        assert "--pool-mib" in (await nodes.decode.ended(job.generation)).detail


async def test_the_queue_is_bounded(tokenizer):
    async with pair(tokenizer, max_queue=2) as nodes:
        nodes.prefill.pages.allocate("blocker", 64)
        jobs = [nodes.job() for _ in range(3)]
        for job in jobs:
            nodes.prefill.serving.accept(job.prefill)
        assert nodes.prefill.serving.queued_jobs == 2
        failed = await nodes.prefill.ended(jobs[2].transfer)
        assert isinstance(failed, Failed)
        assert (failed.stage, failed.cause) == ("queue", "queue_full")
        for job in jobs[:2]:
            nodes.prefill.serving.cancel(job.transfer)
        nodes.prefill.room.release("blocker")


async def test_the_queue_is_counted_in_tokens_that_are_still_to_be_computed(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(300)
        await reach(nodes, job, "streaming")
        serving = nodes.prefill.serving
        assert (serving.queued_jobs, serving.running, serving.open_transfers) == (0, 1, 1)
        assert 299 - 128 <= serving.queued_tokens <= 299
        release(nodes)
        await nodes.idle()
        assert serving.queued_tokens == 0


async def test_the_gateways_priority_reaches_the_engine(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(priority=3)
        nodes.start(job)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        assert nodes.prefill.engine.priorities == [3]
