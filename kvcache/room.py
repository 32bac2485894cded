"""Waiting for room in a page pool, by rank and then in order of arrival.

Only whose turn it is takes pages, so a big transfer is never starved by small ones of equal or greater rank.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.blocks import PagePool
from kvcache.prefix_cache import PrefixCache

Attempt = Callable[[], tuple[int, ...] | None]


class RoomTimeout(Exception):
    """The pages did not become free before the deadline; nothing is held."""


class RoomCrowded(Exception):
    """As many are waiting already as are allowed to; nothing is held."""


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    rank: int
    attempt: Attempt
    pages: asyncio.Future[tuple[int, ...]]


class PageRoom:
    """A queue in front of a PagePool that belongs to one event loop. All of a reservation is granted or none.

    What ``cache`` keeps of the pool counts as free, unless it is leased: it is evicted when a reservation needs it.
    """

    def __init__(self, pool: PagePool, max_waiting: int = 64, cache: PrefixCache | None = None) -> None:
        self.pool = pool
        self.max_waiting = max_waiting
        self.cache = cache
        self._waiters: list[_Waiter] = []
        self._serving = False
        if cache is not None:
            cache.on_freed = self._serve

    @property
    def waiting(self) -> int:
        """Reservations that stand in the queue."""
        return len(self._waiters)

    @property
    def available_pages(self) -> int:
        """Pages that a reservation can have: free ones, and kept ones that no firm lease holds."""
        return self.pool.free_pages + (0 if self.cache is None else self.cache.evictable_pages)

    def free_for(self, count: int) -> bool:
        """Whether ``count`` pages would be granted at once: they are available and nobody waits."""
        return not self._waiters and count <= self.available_pages

    def take(self, owner: str, count: int) -> tuple[int, ...] | None:
        """Take ``count`` pages for ``owner``, whoever waits; None where they are not available.

        For attempts that ``acquire_by`` makes in turn.
        """
        if count > self.available_pages:
            return None
        if count > self.pool.free_pages:
            assert self.cache is not None
            self.cache.evict(count - self.pool.free_pages)
        return self.pool.allocate(owner, count)

    def take_spare(self, owner: str, count: int) -> tuple[int, ...] | None:
        """Take ``count`` pages for something that can do without: only where nobody waits and no lease is revoked."""
        idle = 0 if self.cache is None else self.cache.idle_pages
        if self._waiters or count > self.pool.free_pages + idle:
            return None
        return self.take(owner, count)

    def try_acquire(self, owner: str, count: int) -> tuple[int, ...] | None:
        """Take ``count`` pages for ``owner`` if they are available and nobody waits for any; None otherwise.

        Raises ValueError as ``acquire`` does.
        """
        return self.try_acquire_by(owner, count, lambda: self.take(owner, count))

    def try_acquire_by(self, owner: str, most: int, attempt: Attempt, rank: int = 0) -> tuple[int, ...] | None:
        """``attempt`` at once if nobody of that rank or less waits; None otherwise. Raises as ``acquire`` does."""
        self._check(owner, most)
        return None if self._waiters and self._waiters[0].rank <= rank else attempt()

    async def acquire(self, owner: str, count: int, deadline: float) -> tuple[int, ...]:
        """Take ``count`` pages for ``owner``, waiting in turn until ``deadline`` (the running loop's time).

        Raises ValueError for a count that can never be granted and for an owner that already holds pages or waits,
        RoomCrowded when the queue is full, RoomTimeout at the deadline. A cancelled call holds nothing.
        """
        return await self.acquire_by(owner, count, lambda: self.take(owner, count), deadline)

    async def acquire_by(
        self, owner: str, most: int, attempt: Attempt, deadline: float, rank: int = 0
    ) -> tuple[int, ...]:
        """``acquire`` of a count that only shows when it is granted, and is at most ``most``; the least rank first.

        In its turn, ``attempt`` is made whenever pages have become available, until it takes some for ``owner``. What
        else it takes is its caller's to give back.
        """
        pages = self.try_acquire_by(owner, most, attempt, rank)
        if pages is not None:
            return pages
        if len(self._waiters) >= self.max_waiting:
            raise RoomCrowded(f"{self.waiting} reservations are waiting already, at most {self.max_waiting} may")
        waiter = _Waiter(owner, rank, attempt, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=lambda one: one.rank)
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter.pages
        except BaseException as error:
            self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise RoomTimeout(f"{most} pages did not become free before the deadline") from error
            raise

    def release(self, owner: str) -> int:
        """Give back all pages of ``owner`` (0 where it holds none) and serve whoever is next."""
        freed = self.pool.release(owner)
        self._serve()
        return freed

    def _check(self, owner: str, count: int) -> None:
        if not 1 <= count <= self.pool.capacity:
            raise ValueError(f"count: {count} pages can never be granted from a pool of {self.pool.capacity}")
        if any(waiter.owner == owner for waiter in self._waiters):
            raise ValueError(f"owner: {owner!r} is already waiting")
        if owner in self.pool.owners:
            raise ValueError(f"owner: {owner!r} already holds pages")

    def _leave(self, waiter: _Waiter) -> None:
        """A granted waiter may still be cancelled before it runs again: then its pages go back."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.pages.cancel()
        else:
            self.pool.release(waiter.owner)
        self._serve()

    def _serve(self) -> None:
        """Grant from the front. A waiter whose call was cancelled this very turn stands there still: skip it.

        An attempt may take and give back a lease, which calls this again: there is nothing more to do then.
        """
        if self._serving:
            return
        self._serving = True
        try:
            while self._waiters:
                waiter = self._waiters[0]
                pages = None if waiter.pages.done() else waiter.attempt()
                if pages is None and not waiter.pages.done():
                    return
                self._waiters.remove(waiter)
                if pages is not None:
                    waiter.pages.set_result(pages)
        finally:
            self._serving = False
