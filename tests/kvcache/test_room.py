"""Waiting for pages: in order, within a deadline, and without losing any."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvcache.blocks import PagePool
from kvcache.chain import TokenChain
from kvcache.kept import Provenance
from kvcache.prefix_cache import PrefixCache
from kvcache.quality import Quality
from kvcache.room import PageRoom, RoomCrowded, RoomTimeout


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def waiting(room: PageRoom, owner: str, count: int, seconds: float = 5.0) -> asyncio.Task[tuple[int, ...]]:
    """An acquire that stands in the queue."""
    before = room.waiting
    task = asyncio.create_task(room.acquire(owner, count, soon(seconds)))
    await asyncio.sleep(0)
    assert room.waiting == before + 1
    return task


async def test_free_pages_are_granted_at_once() -> None:
    room = PageRoom(PagePool(4))
    assert len(await room.acquire("a", 3, soon(0))) == 3
    assert room.pool.free_pages == 1


async def test_what_is_taken_without_waiting_overtakes_nobody() -> None:
    room = PageRoom(PagePool(4))
    assert len(room.try_acquire("a", 3) or ()) == 3
    assert not room.free_for(2)
    assert room.try_acquire("b", 2) is None
    big = await waiting(room, "big", 4)
    assert room.pool.free_pages == 1
    assert not room.free_for(1)
    assert room.try_acquire("small", 1) is None
    with pytest.raises(ValueError, match="already waiting"):
        room.try_acquire("big", 1)
    room.release("a")
    assert len(await big) == 4


async def test_a_big_reservation_is_not_overtaken_by_small_ones() -> None:
    room = PageRoom(PagePool(4))
    await room.acquire("a", 2, soon())
    big = await waiting(room, "big", 4)
    small = await waiting(room, "small", 1)
    assert room.pool.free_pages == 2
    room.release("a")
    assert len(await big) == 4
    assert not small.done()
    room.release("big")
    assert len(await small) == 1


async def test_one_release_serves_all_that_fit() -> None:
    room = PageRoom(PagePool(4))
    await room.acquire("a", 4, soon())
    tasks = [await waiting(room, name, 2) for name in "bcd"]
    room.release("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, False]
    room.release("b")
    await tasks[2]
    room.pool.check_integrity()


async def test_a_wait_ends_at_its_deadline_and_lets_the_next_pass() -> None:
    room = PageRoom(PagePool(4))
    await room.acquire("a", 3, soon())
    big = await waiting(room, "big", 4, seconds=0.05)
    small = await waiting(room, "small", 1)
    with pytest.raises(RoomTimeout, match="4 pages did not become free"):
        await big
    assert len(await small) == 1
    assert room.waiting == 0


async def test_a_deadline_in_the_past_does_not_wait() -> None:
    room = PageRoom(PagePool(1))
    await room.acquire("a", 1, soon())
    with pytest.raises(RoomTimeout):
        await room.acquire("b", 1, soon(-1))


async def test_a_cancelled_wait_holds_nothing_and_lets_the_next_pass() -> None:
    room = PageRoom(PagePool(4))
    await room.acquire("a", 3, soon())
    big, small = await waiting(room, "big", 4), await waiting(room, "small", 1)
    big.cancel()
    assert len(await small) == 1
    assert big.cancelled()


async def test_a_cancel_that_meets_the_grant_gives_the_pages_back() -> None:
    room = PageRoom(PagePool(4))
    await room.acquire("a", 4, soon())
    task = await waiting(room, "b", 4)
    room.release("a")
    assert room.pool.owners == {"b": 4}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.pool.free_pages == 4


async def test_a_release_in_the_turn_of_a_cancel_passes_the_cancelled_one_over() -> None:
    room = PageRoom(PagePool(2))
    await room.acquire("holder", 2, soon())
    cancelled, waiter = await waiting(room, "cancelled", 1), await waiting(room, "waiter", 2)
    cancelled.cancel()
    room.release("holder")
    assert len(await waiter) == 2
    await asyncio.gather(cancelled, return_exceptions=True)
    assert room.pool.owners == {"waiter": 2}
    assert room.waiting == 0


@pytest.mark.parametrize("count", [0, -1, 5])
async def test_what_can_never_fit_is_refused_at_once(count: int) -> None:
    with pytest.raises(ValueError, match="can never be granted from a pool of 4"):
        await PageRoom(PagePool(4)).acquire("a", count, soon())


async def test_the_queue_is_bounded() -> None:
    room = PageRoom(PagePool(1), max_waiting=2)
    await room.acquire("a", 1, soon())
    tasks = [await waiting(room, name, 1) for name in "bc"]
    with pytest.raises(RoomCrowded, match="2 reservations are waiting already"):
        await room.acquire("d", 1, soon())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_owner_reserves_once() -> None:
    room = PageRoom(PagePool(2))
    await room.acquire("a", 2, soon())
    task = await waiting(room, "b", 1)
    with pytest.raises(ValueError, match="'a' already holds pages"):
        await room.acquire("a", 1, soon())
    with pytest.raises(ValueError, match="'b' is already waiting"):
        await room.acquire("b", 1, soon())
    room.release("a")
    await task


async def test_releasing_an_unknown_owner_is_harmless() -> None:
    assert PageRoom(PagePool(1)).release("nobody") == 0


async def test_no_page_is_lost_in_a_crowd_of_waits_cancels_and_timeouts() -> None:
    room = PageRoom(PagePool(8), max_waiting=1000)
    rng = random.Random(7)

    async def one(n: int) -> None:
        try:
            pages = await room.acquire(f"t{n}", rng.randint(1, 8), soon(rng.random() * 0.2))
        except RoomTimeout:
            return
        assert room.pool.owners[f"t{n}"] == len(pages)
        try:
            await asyncio.sleep(rng.random() * 0.005)
        finally:
            room.release(f"t{n}")

    tasks = [asyncio.create_task(one(n)) for n in range(300)]
    for task in rng.sample(tasks, 60):
        await asyncio.sleep(0.001)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    room.pool.check_integrity()
    assert room.pool.free_pages == 8
    assert room.waiting == 0


def caching(pages: int, kept: int) -> tuple[PageRoom, PrefixCache, TokenChain]:
    """A room of which ``kept`` pages hold a prompt's blocks, one each."""
    pool = PagePool(pages)
    cache = PrefixCache(pool, 4, snapshots=False)
    room = PageRoom(pool, cache=cache)
    chain = TokenChain.of(range(4 * kept), 4, fingerprint="f", salt="")
    cache.keep("early", chain, 0, [(page,) for page in pool.allocate("early", kept)], Provenance())
    return room, cache, chain


async def test_kept_pages_are_as_good_as_free_ones() -> None:
    room, cache, _ = caching(4, 3)
    assert room.free_for(4)
    assert len(await room.acquire("a", 3, soon(0))) == 3
    assert cache.figures.pages == 1
    assert cache.figures.evicted_pages == 2
    cache.check_integrity()


async def test_who_waits_for_a_leased_page_gets_it_when_the_lease_ends() -> None:
    room, cache, chain = caching(4, 3)
    lease = cache.lease(chain.hashes, 12, Quality.EXACT, resume=True)
    assert lease is not None
    first = await waiting(room, "a", 2)
    assert room.available_pages == 1
    lease.release()
    assert len(await first) == 2
    cache.check_integrity()


async def test_an_attempt_that_gives_its_lease_back_does_not_start_another_round() -> None:
    room, cache, chain = caching(4, 2)
    await room.acquire("a", 2, soon())
    tries = []

    def attempt() -> tuple[int, ...] | None:
        lease = cache.lease(chain.hashes, 8, Quality.EXACT, resume=True)
        assert lease is not None
        tries.append(len(tries))
        pages = room.take("b", 3)
        lease.release()
        return pages

    task = asyncio.create_task(room.acquire_by("b", 3, attempt, soon(0.2)))
    await asyncio.sleep(0.01)
    room.release("nobody")
    assert tries == [0, 1]
    with pytest.raises(RoomTimeout):
        await task
    cache.check_integrity()


async def test_what_can_do_without_takes_nothing_while_somebody_waits() -> None:
    room, cache, chain = caching(4, 3)
    assert len(room.take_spare("offer", 2) or ()) == 2
    lease = cache.lease(chain.hashes, 4, Quality.EXACT, resume=False, revoked=lambda: None)
    assert lease is not None
    assert room.take_spare("another", 2) is None, "it would revoke a lease"
    task = await waiting(room, "big", 4)
    assert room.take_spare("another", 1) is None
    room.release("offer")
    assert len(await task) == 4
    assert lease.gone
    cache.check_integrity()


async def test_of_those_that_wait_the_least_rank_is_next_and_a_newcomer_of_less_passes() -> None:
    room = PageRoom(PagePool(4))
    assert room.try_acquire("held", 4) is not None
    loop = asyncio.get_running_loop()
    order: list[str] = []

    async def wait(owner: str, rank: int, count: int = 3) -> None:
        await room.acquire_by(owner, count, lambda: room.take(owner, count), loop.time() + 5, rank)
        order.append(owner)
        room.release(owner)

    tasks = []
    for owner, rank in (("b", 5), ("a", 1), ("c", 5)):
        tasks.append(asyncio.create_task(wait(owner, rank)))
        await asyncio.sleep(0)
    assert room.try_acquire_by("equal", 1, lambda: room.take("equal", 1), rank=1) is None
    room.pool.release("held")
    assert room.try_acquire_by("less", 1, lambda: room.take("less", 1), rank=0) is not None
    room.release("less")
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
