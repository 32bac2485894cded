"""Work in threads on memory that must not be given away before the threads are done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadWork:
    """One job's calls in a shared pool of threads. Cancelling a caller stops no thread: ``settle`` waits for them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._calls: set[Future[Any]] = set()

    def start(self, call: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run ``call`` in a thread; the future holds its result."""
        running: Future[T] = self._executor.submit(call, *args)
        self._calls = {other for other in self._calls if not other.done()} | {running}
        return asyncio.wrap_future(running)

    async def settle(self) -> None:
        """Drop the calls that have not begun and wait for the others: afterwards no thread touches the job's memory."""
        for call in self._calls:
            call.cancel()
        waiting = [asyncio.wrap_future(call) for call in self._calls if not call.done()]
        await asyncio.gather(*waiting, return_exceptions=True)
        self._calls.clear()
