"""Events of the prefix cache over the control streams, never so many at once that jobs and beats would wait for them.

Nothing is sent until a gateway asks. What it has not been sent yet lies in the log; where it falls behind so far that
the log let go of something, it is told everything anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvcache.background import in_background
from kvcache.control import KvEvents
from node.event_log import EventLog, Stored

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 256 << 10
RESTATE_EVERY_S = 5.0
_LOOK_S = 0.02


class Stream(Protocol):
    """The control stream as far as events need it."""

    @property
    def backlog_bytes(self) -> int:
        """What is queued and not yet written."""

    def send(self, message: KvEvents) -> None:
        """Queue a message."""

    async def flush(self, timeout_s: float) -> None:
        """Return when all that was sent is written, or after ``timeout_s``."""


class EventFeed:
    """Follows the log for one gateway. ``run`` does so until cancelled; ``close`` lets go of the log."""

    def __init__(self, events: EventLog, cache: Callable[[], Stored], stream: Callable[[], Stream]) -> None:
        self._events = events
        self._cache = cache
        self._stream = stream
        self._next: int | None = None
        self._news = asyncio.Event()
        self._restated_at = float("-inf")
        events.on_batch.append(self._on_batch)

    def replay(self, start_seq: int) -> None:
        """The gateway asks for all from this number on; a number that is not to be had is answered with everything."""
        self._events.flush()
        known = self._events.first_seq <= start_seq <= self._events.next_seq
        self._next = start_seq if known else -1
        self._news.set()

    def stop(self) -> None:
        """The session is over."""
        self._next = None

    def close(self) -> None:
        """Hear of no more batches."""
        self._events.on_batch.remove(self._on_batch)

    async def run(self) -> None:
        """Send what the log has, whenever the stream has room for it."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._next is not None and self._next != self._events.next_seq:
                if self._stream().backlog_bytes > MAX_UNSENT_BYTES:
                    await self._stream().flush(_LOOK_S)
                elif not self._events.first_seq <= self._next < self._events.next_seq:
                    await self._restate()
                else:
                    self._stream().send(KvEvents(self._next, self._events.batch(self._next)))
                    self._next += 1

    def _on_batch(self, seq: int, payload: bytes) -> None:
        self._news.set()

    async def _restate(self) -> None:
        """Begin anew, but not all the time: what changes faster than it can be told is told as it is then.

        What was restated for another gateway serves this one, too.
        """
        whole = self._events.whole_from
        if whole is not None:
            self._next = whole
            return
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._restated_at + RESTATE_EVERY_S - loop.time())
        if self._next is not None:
            self._restated_at = loop.time()
            self._next = self._events.restate(self._cache())
            log.info("kv events told anew from=%d to=%d", self._next, self._events.next_seq)


class EventFeeds:
    """A feed for each gateway that asked. ``stream`` finds the stream of one by its name."""

    def __init__(self, events: EventLog, cache: Callable[[], Stored], stream: Callable[[str], Stream]) -> None:
        self._events = events
        self._cache = cache
        self._stream = stream
        self._feeds: dict[str, tuple[EventFeed, asyncio.Task[None]]] = {}

    def replay(self, gateway: str, start_seq: int) -> None:
        """As ``EventFeed.replay``, of one gateway."""
        if gateway not in self._feeds:
            feed = EventFeed(self._events, self._cache, lambda: self._stream(gateway))
            self._feeds[gateway] = feed, in_background(feed.run(), log, "the feed of kv events broke")
        self._feeds[gateway][0].replay(start_seq)

    def stop(self, gateway: str) -> None:
        """A session is over."""
        found = self._feeds.pop(gateway, None)
        if found is not None:
            feed, task = found
            feed.stop()
            feed.close()
            task.cancel()

    def close(self) -> None:
        """End them all."""
        for gateway in list(self._feeds):
            self.stop(gateway)
