"""Waiting for room in a page pool: first come, first served, so that a big transfer is never starved by small ones."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from kvcache.blocks import PagePool


class RoomTimeout(Exception):
    """The pages did not become free before the deadline; nothing is held."""


class RoomCrowded(Exception):
    """As many are waiting already as are allowed to; nothing is held."""


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    count: int
    pages: asyncio.Future[tuple[int, ...]]


class PageRoom:
    """A queue in front of a PagePool that belongs to one event loop. All of a reservation is granted or none."""

    def __init__(self, pool: PagePool, max_waiting: int = 64) -> None:
        self.pool = pool
        self.max_waiting = max_waiting
        self._waiters: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        """Reservations that stand in the queue."""
        return len(self._waiters)

    def free_for(self, count: int) -> bool:
        """Whether ``count`` pages would be granted at once: they are free and nobody waits."""
        return not self._waiters and count <= self.pool.free_pages

    def try_acquire(self, owner: str, count: int) -> tuple[int, ...] | None:
        """Take ``count`` pages for ``owner`` if they are free and nobody waits for any; None otherwise.

        Raises ValueError as ``acquire`` does.
        """
        self._check(owner, count)
        return self.pool.allocate(owner, count) if self.free_for(count) else None

    async def acquire(self, owner: str, count: int, deadline: float) -> tuple[int, ...]:
        """Take ``count`` pages for ``owner``, waiting in turn until ``deadline`` (the running loop's time).

        Raises ValueError for a count that can never be granted and for an owner that already holds pages or waits,
        RoomCrowded when the queue is full, RoomTimeout at the deadline. A cancelled call holds nothing.
        """
        pages = self.try_acquire(owner, count)
        if pages is not None:
            return pages
        if len(self._waiters) >= self.max_waiting:
            raise RoomCrowded(f"{self.waiting} reservations are waiting already, at most {self.max_waiting} may")
        waiter = _Waiter(owner, count, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter.pages
        except BaseException as error:
            self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise RoomTimeout(f"{count} pages did not become free before the deadline") from error
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
        """Grant from the front. A waiter whose call was cancelled this very turn stands there still: skip it."""
        while self._waiters and (self._waiters[0].pages.done() or self._waiters[0].count <= self.pool.free_pages):
            waiter = self._waiters.popleft()
            if not waiter.pages.done():
                waiter.pages.set_result(self.pool.allocate(waiter.owner, waiter.count))
