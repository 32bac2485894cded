"""A prefix that one node keeps is taken in by another: what is sent, what is kept, and that no ending leaves a hold."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from decode_client import fetch
from decode_client.landing import check_batch
from kvcache.control import Cancelled, Failed, Finished, SharePrefix, TakePrefix, TransferDone
from kvcache.plan import plan_transfer
from kvcache.prefix_cache import Match
from kvcache.quality import Quality
from tests import fake_engine
from tests.pair import CHUNK, GEOMETRY, LAYOUT, Pair, pair
from tests.prefill_service.test_cached_prefix import BLOCK, FIRST, SECOND, finish, match
from tests.prefill_service.test_inexact_transfer import small_integers

KEPT = len(FIRST) // BLOCK * BLOCK
"""What a prefill of ``FIRST`` leaves: blocks, and windows and states at their end."""


@dataclass(frozen=True)
class Move:
    """Both orders of one move, and the job that they are."""

    job: str
    share: SharePrefix
    take: TakePrefix


async def kept_in_the_east(nodes: Pair, west_keeps: int = 0, **changes: object) -> None:
    """East has prefilled ``FIRST``; of it west has the first ``west_keeps`` tokens, in blocks alone."""
    await finish(nodes, nodes.job(ids=FIRST, **changes))
    nodes.decode.cache.evict(nodes.decode.cache.evictable_pages)
    if west_keeps:
        await finish(nodes, nodes.job(ids=FIRST[: west_keeps + 2], **changes))
    assert match(nodes.prefill, SECOND) == Match(KEPT, KEPT)
    assert match(nodes.decode, SECOND) == Match(west_keeps, 0)


def a_move(nodes: Pair, start: int = 0, stop: int = KEPT, codec: str = "raw", **changes: object) -> Move:
    job = nodes.job(ids=FIRST, start=start, stop=stop, **changes)
    assert job.generate.source is not None
    share = SharePrefix(job.prefill.ticket, FIRST[:stop], codec, job.prefill.dial)
    return Move(job.transfer, share, TakePrefix(job.generate.source, FIRST[:stop]))


def order(nodes: Pair, move: Move) -> None:
    nodes.prefill.serving.accept(move.share)
    nodes.decode.asking.take(move.take)


@pytest.mark.parametrize("dial", ["in", "out"])
@pytest.mark.parametrize("start", [0, CHUNK])
async def test_a_moved_prefix_is_gone_on_from_as_if_it_had_been_computed_here(
    tokenizer: Tokenizer, dial: str, start: int
) -> None:
    async with pair(tokenizer, dial=dial) as nodes:
        await kept_in_the_east(nodes, start)
        jobs = len(nodes.prefill.engine.cached)
        move = a_move(nodes, start)
        order(nodes, move)
        done = await nodes.decode.told(TransferDone, move.job)
        assert done.raw_bytes == plan_transfer(LAYOUT, start, KEPT, CHUNK).nbytes
        await nodes.idle()
        assert match(nodes.decode, SECOND) == Match(KEPT, KEPT)
        assert len(nodes.prefill.engine.cached) == jobs, "the source computes nothing"
        here = msgspec.structs.replace(nodes.job(ids=SECOND).generate, source=None)
        nodes.decode.asking.accept(here)
        ended = await nodes.decode.ended(here.generation)
        assert isinstance(ended, Finished), "its fake engine looks at every byte"
        assert ended.cached_tokens == KEPT


async def test_blocks_that_are_here_are_not_kept_twice(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes, CHUNK)
        order(nodes, move := a_move(nodes))
        await nodes.decode.told(TransferDone, move.job)
        await nodes.idle()
        assert match(nodes.decode, SECOND) == Match(KEPT, KEPT)
        assert nodes.decode.cache.figures.pages == GEOMETRY.pages_for(0, KEPT)


@pytest.mark.parametrize("stop", [KEPT - BLOCK, KEPT])
async def test_a_source_without_the_blocks_or_the_snapshot_says_so_and_computes_nothing(
    tokenizer: Tokenizer, stop: int
) -> None:
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes)
        if stop == KEPT:
            nodes.prefill.cache.evict(nodes.prefill.cache.evictable_pages)
        jobs = len(nodes.prefill.engine.cached)
        order(nodes, move := a_move(nodes, stop=stop))
        failed = await nodes.prefill.ended(move.job)
        assert isinstance(failed, Failed)
        assert (failed.stage, failed.cause) == ("transfer", "prefix_gone")
        assert isinstance(await nodes.decode.ended(move.job), Failed)
        assert len(nodes.prefill.engine.cached) == jobs


async def test_a_target_that_lost_what_was_to_be_left_out_says_so(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes)
        move = a_move(nodes, CHUNK, seconds=0.5)
        order(nodes, move)
        failed = await nodes.decode.ended(move.job)
        assert isinstance(failed, Failed)
        assert failed.cause == "prefix_gone"


async def test_a_target_without_room_to_spare_fails_at_once_and_takes_nothing_from_those_who_wait(
    tokenizer: Tokenizer,
) -> None:
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes)
        room = nodes.decode.room
        room.try_acquire("the test", room.pool.capacity - GEOMETRY.pages_for(0, KEPT) + 1)
        order(nodes, move := a_move(nodes))
        failed = await nodes.decode.ended(move.job)
        assert isinstance(failed, Failed)
        assert failed.cause == "no_room"
        told = await nodes.prefill.ended(move.job)
        assert isinstance(told, Failed)
        assert told.cause == "aborted"
        assert nodes.decode.cache.figures.pages == 0
        await nodes.idle_but("the test")
        room.release("the test")


async def test_a_share_that_nobody_fetches_holds_its_prefix_until_the_tickets_deadline(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes)
        move = a_move(nodes, seconds=0.3)
        nodes.prefill.serving.accept(move.share)
        await nodes.prefill.until(lambda: nodes.prefill.cache.figures.pinned_pages)
        nodes.prefill.cache.evict(nodes.prefill.cache.evictable_pages)
        assert match(nodes.prefill, SECOND) == Match(KEPT, KEPT)
        failed = await nodes.prefill.ended(move.job)
        assert isinstance(failed, Failed)
        assert failed.cause == "deadline"


@pytest.fixture
def verifying(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, nothing that has arrived is found to be right."""
    go = threading.Event()

    def held(*args: Any) -> Any:
        go.wait(10.0)
        return check_batch(*args)

    monkeypatch.setattr(fetch, "check_batch", held)
    yield go
    go.set()


@pytest.mark.parametrize("which", ["source", "target", "link"])
async def test_whatever_ends_a_move_in_its_middle_ends_it_on_both_sides(
    tokenizer: Tokenizer, verifying: threading.Event, which: str
) -> None:
    async with pair(tokenizer) as nodes:
        verifying.set()
        await kept_in_the_east(nodes)
        verifying.clear()
        order(nodes, move := a_move(nodes))
        await nodes.decode.until(lambda: nodes.decode.pages.owners)
        if which == "source":
            nodes.prefill.serving.cancel(move.job)
        elif which == "target":
            nodes.decode.asking.cancel(move.job)
        else:
            nodes.decode.asking._intakes[move.job].fetch.peer.close("cut by the test")
        assert nodes.prefill.cache.figures.pinned_pages
        await nodes.prefill.ended(move.job)
        verifying.set()
        side = nodes.prefill if which == "source" else nodes.decode
        assert isinstance(await side.ended(move.job), Failed if which == "link" else Cancelled)
        await nodes.idle()
        assert match(nodes.decode, SECOND) == Match(0, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_moves_that_are_cancelled_at_any_moment_leave_nothing_held(tokenizer: Tokenizer, seed: int) -> None:
    source = random.Random(seed)
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes)
        for _ in range(25):
            order(nodes, move := a_move(nodes))
            sides = [nodes.prefill.serving, nodes.decode.asking]
            source.shuffle(sides)
            for side in sides:
                await asyncio.sleep(source.random() * 0.008)
                side.cancel(move.job)
            await nodes.idle()
            nodes.decode.cache.evict(nodes.decode.cache.evictable_pages)


async def test_what_came_by_an_inexact_codec_is_kept_as_such(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "piece_bytes", small_integers)
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.check_bytes = False
        await kept_in_the_east(nodes)
        order(nodes, move := a_move(nodes, codec="int8", quality=Quality.NEAR))
        await nodes.decode.told(TransferDone, move.job)
        assert match(nodes.decode, SECOND) == Match(0, 0)
        assert match(nodes.decode, SECOND, Quality.NEAR) == Match(KEPT, KEPT)
        first = next(iter(nodes.decode.cache.stored())).hash
        [block] = nodes.decode.cache.find([first])
        assert block.provenance.codecs == ("int8",)
        assert block.provenance.origin == "east"


async def test_what_is_kept_inexactly_is_not_shared_as_if_it_were_exact(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "piece_bytes", small_integers)
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.check_bytes = False
        await finish(nodes, nodes.job(ids=FIRST, codec="int8", quality=Quality.NEAR))
        assert match(nodes.decode, SECOND, Quality.NEAR).held == KEPT
        west = {"prefill_node": nodes.decode.name, "prefill_incarnation": nodes.decode.incarnation}
        move = a_move(nodes, **west)
        nodes.decode.serving.accept(move.share)
        failed = await nodes.decode.ended(move.job)
        assert isinstance(failed, Failed)
        assert failed.cause == "prefix_gone"


async def test_orders_that_cannot_be_are_refused_with_the_field(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes)
        ragged = a_move(nodes, stop=KEPT - 1)
        order(nodes, ragged)
        for side in (nodes.prefill, nodes.decode):
            failed = await side.ended(ragged.job)
            assert isinstance(failed, Failed)
            assert (failed.stage, failed.cause) == ("queue", "bad_order")
        short = a_move(nodes)
        nodes.decode.asking.take(msgspec.structs.replace(short.take, token_ids=FIRST[: KEPT - BLOCK]))
        failed = await nodes.decode.ended(short.job)
        assert isinstance(failed, Failed)
        assert failed.cause == "bad_ticket"
        assert "stop" in failed.detail


async def test_a_repeated_order_changes_nothing(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        await kept_in_the_east(nodes)
        move = a_move(nodes)
        for _ in range(2):
            order(nodes, move)
        await nodes.decode.told(TransferDone, move.job)
        await nodes.idle()
        assert not [m for m in (*nodes.prefill.reports, *nodes.decode.reports) if isinstance(m, Failed)]


async def test_a_node_that_keeps_nothing_shares_and_takes_nothing(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as nodes:
        for side in (nodes.prefill, nodes.decode):
            side.room.cache = None
        order(nodes, move := a_move(nodes))
        for side, cause in ((nodes.prefill, "prefix_gone"), (nodes.decode, "no_cache")):
            failed = await side.ended(move.job)
            assert isinstance(failed, Failed)
            assert failed.cause == cause
