"""A coroutine that runs in the very calls that bring what it waits for, and not in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Eager:
    """Runs a coroutine: in ``start`` until it waits for the first time, then on as soon as that is there.

    Of what a task costs, its making and a turn of the event loop before its first step are saved. The coroutine awaits
    futures; what asks for the current task, as time-outs do, it runs in a task and awaits that. Before the coroutine is
    over ``over`` is called. An exception that it lets out is raised to whoever made it go on.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], over: Callable[[Eager], None]) -> None:
        self._coroutine = coroutine
        self._over = over
        self._awaits: asyncio.Future[Any] | None = None
        self._cancelled = False
        self._running = False

    def start(self) -> None:
        """Once."""
        self._go_on(None)

    def cancel(self, msg: object = None) -> bool:
        """Have the coroutine raise CancelledError where it waits; False where it is over.

        Where it waits no longer it still gets what it waited for, which may need to be given back, and is cancelled
        where it waits next.
        """
        if self._awaits is None and not self._running:
            return False
        if self._awaits is None or not self._awaits.cancel():
            self._cancelled = True
        return True

    def _go_on(self, awaited: asyncio.Future[Any] | None) -> None:
        self._awaits, self._running = None, True
        try:
            if awaited is not None and awaited.cancelled():  # said, since a turn that is given does not ask
                awaits = self._coroutine.throw(asyncio.CancelledError())
            else:
                awaits = self._coroutine.send(None)
        except BaseException as end:
            self._over(self)
            if not isinstance(end, (StopIteration, asyncio.CancelledError)):
                raise
            return
        finally:
            self._running = False
        if awaits is None:  # a turn of the event loop, as ``sleep(0)`` asks for
            awaits = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(_let_go, awaits)
        awaits._asyncio_future_blocking = False  # as a task does: it is awaited by who knows how
        awaits.add_done_callback(self._go_on)
        self._awaits = awaits
        if self._cancelled and awaits.cancel():
            self._cancelled = False


def _let_go(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
