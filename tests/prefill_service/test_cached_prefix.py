"""Turns of conversations between two nodes that keep what passes through them. The fake engines check every byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest
from tokenizers import Tokenizer

from kvcache.chain import TokenChain
from kvcache.control import Cancelled, Failed, Finished, PrefillDone, PrefillStarted, TransferDone
from kvcache.plan import plan_transfer
from kvcache.prefix_cache import Match
from kvcache.quality import Quality
from kvcache.tables import block_pages
from tests import fake_engine
from tests.pair import CHUNK, FINGERPRINT, GEOMETRY, LAYOUT, Job, Pair, Side, pair
from tests.prefill_service.test_inexact_transfer import small_integers

BLOCK = GEOMETRY.block_tokens
FIRST = tuple(range(4, 304))
SPOKEN = [300 + n % 100 for n in range(70)]
SECOND = (*FIRST, *SPOKEN, *range(404, 494))


def match(side: Side, ids: Sequence[int], quality: Quality = Quality.EXACT) -> Match:
    """What a node could use for a prompt of these tokens."""
    chain = TokenChain.of(ids[:-1], BLOCK, fingerprint=FINGERPRINT, salt="")
    return side.cache.match(chain.hashes, quality)


async def finish(nodes: Pair, job: Job) -> Finished:
    nodes.start(job)
    ended = await nodes.decode.ended(job.generation)
    assert isinstance(ended, Finished), ended
    await nodes.idle()
    return ended


async def first_turn(nodes: Pair, **changes: object) -> None:
    nodes.decode.engine.speech = SPOKEN
    await finish(nodes, nodes.job(ids=FIRST, max_tokens=len(SPOKEN), **changes))
    nodes.decode.engine.speech = [7, 8, 9]


async def test_both_sides_keep_what_their_kind_of_work_can_use_again(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await first_turn(nodes)
        assert match(nodes.prefill, SECOND) == Match(256, 256)
        assert match(nodes.decode, SECOND) == Match(320, 320)


@pytest.mark.parametrize("start", [0, 64, 256, 320])
async def test_a_second_turn_computes_and_sends_only_what_is_new(tokenizer: Tokenizer, start: int) -> None:
    async with pair(tokenizer) as nodes:
        await first_turn(nodes)
        job = nodes.job(ids=SECOND, start=start)
        ended = await finish(nodes, job)
        assert nodes.prefill.engine.cached[job.transfer] == 256
        started = await nodes.prefill.told(PrefillStarted, job.transfer)
        done = await nodes.prefill.told(PrefillDone, job.transfer)
        assert started.cached_tokens == done.cached_tokens == 256
        assert done.tokens == len(SECOND) - 1 - 256
        sent = await nodes.decode.told(TransferDone, job.transfer)
        assert sent.raw_bytes == plan_transfer(LAYOUT, start, len(SECOND) - 1, CHUNK).nbytes
        assert ended.cached_tokens == 0, "that is the prefill node's to say"
        whole = (len(SECOND) - 1) // BLOCK * BLOCK
        assert match(nodes.prefill, SECOND) == Match(whole, whole)
        assert match(nodes.decode, SECOND).held == whole


async def test_a_prefill_in_place_goes_on_from_what_was_said(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await first_turn(nodes)
        order = msgspec.structs.replace(nodes.job(ids=SECOND).generate, source=None)
        nodes.decode.asking.accept(order)
        ended = await nodes.decode.ended(order.generation)
        assert isinstance(ended, Finished)
        assert ended.cached_tokens == 320
        assert nodes.decode.engine.cached[order.generation] == 320
        await nodes.idle()
        whole = (len(SECOND) - 1) // BLOCK * BLOCK
        assert match(nodes.decode, SECOND) == Match(whole, whole)


async def test_a_prompt_that_ends_on_a_block_needs_no_computing_in_place(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        ids = tuple(range(4, 4 + 2 * BLOCK + 1))
        await finish(nodes, nodes.job(ids=ids))
        order = msgspec.structs.replace(nodes.job(ids=ids).generate, source=None)
        nodes.decode.asking.accept(order)
        ended = await nodes.decode.ended(order.generation)
        assert isinstance(ended, Finished)
        assert ended.cached_tokens == 2 * BLOCK


async def test_an_answer_that_a_stop_string_ended_is_kept_as_far_as_it_was_read(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.speech = SPOKEN
        end = tokenizer.decode(SPOKEN[25:27])
        ended = await finish(nodes, nodes.job(ids=FIRST, max_tokens=len(SPOKEN), stops=(end,)))
        assert (ended.reason, ended.stop_text) == ("stop", end)
        assert ended.completion_tokens < len(SPOKEN)
        assert match(nodes.decode, SECOND).held == 320


async def test_an_answer_that_ends_while_its_cancel_is_under_way_is_kept_under_its_own_name(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late(job: str) -> None:
        """The engine has ended the job before the word to cancel it reaches it."""

    async with pair(tokenizer) as nodes:
        engine = nodes.decode.engine
        engine.speech = SPOKEN
        engine.voice.clear()
        job = nodes.job(ids=FIRST, max_tokens=len(SPOKEN))
        nodes.start(job)
        await nodes.decode.until(lambda: nodes.decode.asking.running)
        monkeypatch.setattr(engine, "cancel", too_late)
        nodes.decode.asking.cancel(job.generation)
        engine.voice.set()
        assert isinstance(await nodes.decode.ended(job.generation), Cancelled)
        await nodes.idle()
        assert match(nodes.decode, SECOND) == Match(320, 320)


async def test_a_prefix_that_is_not_held_fails_the_job_at_once(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        job = nodes.job(ids=SECOND, start=256)
        nodes.start(job)
        failed = await nodes.decode.ended(job.generation, within=1.0)
        assert isinstance(failed, Failed)
        assert (failed.stage, failed.cause) == ("transfer", "prefix_gone")
        nodes.prefill.serving.cancel(job.transfer)


async def test_another_tenant_finds_nothing(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await first_turn(nodes)
        job = nodes.job(ids=SECOND)
        job = Job(
            job.ticket,
            msgspec.structs.replace(job.prefill, salt="other"),
            msgspec.structs.replace(job.generate, salt="other"),
        )
        await finish(nodes, job)
        assert (await nodes.prefill.told(PrefillStarted, job.transfer)).cached_tokens == 0


async def test_what_came_by_an_inexact_codec_serves_only_requests_that_allow_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "piece_bytes", small_integers)
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.check_bytes = False
        await first_turn(nodes, codec="int8", quality=Quality.NEAR)
        assert match(nodes.decode, SECOND) == Match(0, 0)
        assert match(nodes.decode, SECOND, Quality.NEAR) == Match(320, 320)
        assert match(nodes.prefill, SECOND) == Match(256, 256), "what it computed itself is exact"
        job = nodes.job(ids=SECOND, start=256)
        nodes.decode.asking.accept(job.generate)
        failed = await nodes.decode.ended(job.generation)
        assert isinstance(failed, Failed)
        assert failed.cause == "prefix_gone"


async def test_a_job_whose_turn_it_is_takes_the_room_of_prefixes_that_wait(tokenizer: Tokenizer) -> None:
    one = GEOMETRY.pages_for(0, len(FIRST) - 1)
    async with pair(tokenizer, decode_pages=one + 6) as nodes:
        await finish(nodes, nodes.job(ids=FIRST))
        waits = nodes.job(ids=SECOND[:400], start=256)
        nodes.decode.asking.accept(waits.generate)
        await nodes.decode.until(lambda: nodes.decode.cache.figures.pinned_pages)
        other = nodes.job(ids=FIRST[::-1])
        nodes.start(other)
        assert isinstance(await nodes.decode.ended(other.generation), Finished)
        failed = await nodes.decode.ended(waits.generation)
        assert isinstance(failed, Failed)
        assert (failed.stage, failed.cause) == ("transfer", "prefix_gone")


async def test_a_job_of_the_whole_pool_fits_however_much_is_kept(tokenizer: Tokenizer) -> None:
    one = GEOMETRY.pages_for(0, len(SECOND) - 1)
    async with pair(tokenizer, prefill_pages=one, decode_pages=one) as nodes:
        await first_turn(nodes)
        await finish(nodes, nodes.job(ids=SECOND))
        await finish(nodes, nodes.job(ids=SECOND[::-1]))


async def test_without_a_cache_every_transfer_is_whole(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        for side in (nodes.prefill, nodes.decode):
            side.room.cache = None
        await first_turn(nodes)
        job = nodes.job(ids=SECOND)
        await finish(nodes, job)
        assert (await nodes.prefill.told(PrefillStarted, job.transfer)).cached_tokens == 0
        refused = nodes.job(ids=SECOND, start=64)
        nodes.decode.asking.accept(refused.generate)
        failed = await nodes.decode.ended(refused.generation)
        assert isinstance(failed, Failed)
        assert failed.cause == "prefix_gone"


async def test_a_job_that_fails_half_way_leaves_what_it_had_computed(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine.fail_prefill_after = 2
        job = nodes.job(ids=SECOND)
        nodes.start(job)
        assert isinstance(await nodes.prefill.ended(job.transfer), Failed)
        await nodes.idle()
        assert match(nodes.prefill, SECOND).held == 2 * CHUNK
        kept = nodes.prefill.cache.figures.pages
        assert kept == len(block_pages(GEOMETRY.table(0, 256, range(GEOMETRY.pages_for(0, 256))), 0, 4)) * 2


@pytest.mark.parametrize("seed", range(2))
async def test_conversations_larger_than_the_pools_go_on_whatever_is_evicted_and_cancelled(
    tokenizer: Tokenizer, seed: int
) -> None:
    source = random.Random(seed)
    most = GEOMETRY.pages_for(0, 700)
    async with pair(tokenizer, prefill_pages=most * 4, decode_pages=most * 2) as nodes:
        nodes.decode.engine.speech = SPOKEN
        talks = [tuple(source.randrange(4, 500) for _ in range(150)) for _ in range(6)]
        ends = {"finished": 0, "prefix_gone": 0, "cancelled": 0}

        async def converse(talk: tuple[int, ...]) -> None:
            while len(talk) < 600:
                start = match(nodes.decode, talk).held
                start = start - BLOCK if start == len(talk) - 1 else start
                if source.random() < 0.2:
                    start = min(start + BLOCK, (len(talk) - 2) // BLOCK * BLOCK)
                job = nodes.job(ids=talk, start=start, max_tokens=len(SPOKEN))
                nodes.start(job)
                if source.random() < 0.25:
                    await asyncio.sleep(source.random() * 0.03)
                    nodes.prefill.serving.cancel(job.transfer)
                    nodes.decode.asking.cancel(job.generation)
                ended = await nodes.decode.ended(job.generation, 30.0)
                if isinstance(ended, Finished):
                    ends["finished"] += 1
                    more = -(len(talk) + len(SPOKEN) - 1) % BLOCK if source.random() < 0.5 else 30
                    talk = (*talk, *SPOKEN, *(source.randrange(4, 500) for _ in range(more)))
                    continue
                nodes.prefill.serving.cancel(job.transfer)
                assert isinstance(ended, Cancelled) or ended.cause in ("prefix_gone", "aborted"), ended
                ends["cancelled" if isinstance(ended, Cancelled) else "prefix_gone"] += 1

        await asyncio.gather(*(converse(talk) for talk in talks))
        assert ends["finished"] >= 24
        assert nodes.decode.cache.figures.evicted_pages > 0
        assert nodes.decode.cache.figures.hit_tokens > 0
        assert nodes.prefill.cache.figures.hit_tokens > 0
