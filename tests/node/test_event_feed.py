"""Events over the control stream: only when asked, in order, never in the way of anything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvcache.control import KvEvents
from kvcache.kv_events import AllBlocksCleared, decode_batch
from node import event_feed
from node.event_feed import MAX_UNSENT_BYTES, EventFeed, EventFeeds
from node.event_log import EventLog
from tests.node.test_event_log import BLOCK, Cache, chain


class Stream:
    """Takes what is sent; ``backlog_bytes`` is what a test says."""

    def __init__(self) -> None:
        self.sent: list[KvEvents] = []
        self.backlog_bytes = 0

    def send(self, message: KvEvents) -> None:
        self.sent.append(message)

    async def flush(self, timeout_s: float) -> None:
        await asyncio.sleep(0.001)

    def numbers(self) -> list[int]:
        return [message.seq for message in self.sent]


@asynccontextmanager
async def feeding(log: EventLog, cache: Cache) -> AsyncIterator[tuple[EventFeed, Stream]]:
    stream = Stream()
    feed = EventFeed(log, lambda: cache, lambda: stream)
    task = asyncio.create_task(feed.run())
    try:
        yield feed, stream
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def tell(log: EventLog, batches: int, first: int = 0) -> None:
    for at in range(batches):
        log.stored(chain(1, first=(first + at) * 1000))
        log.flush()


async def test_nothing_is_sent_before_it_is_asked_for_nor_after_the_session() -> None:
    log = EventLog(BLOCK, "mamba")
    async with feeding(log, Cache([], [])) as (feed, stream):
        tell(log, 2)
        await asyncio.sleep(0.01)
        assert stream.sent == []
        feed.replay(0)
        await asyncio.sleep(0.01)
        assert stream.numbers() == [0, 1]
        tell(log, 1, first=5)
        await asyncio.sleep(0.01)
        assert stream.numbers() == [0, 1, 2]
        assert [message.payload for message in stream.sent] == [payload for _, payload in log.kept_from(0)]
        feed.stop()
        tell(log, 1, first=6)
        await asyncio.sleep(0.01)
        assert stream.numbers() == [0, 1, 2]


async def test_a_replay_begins_where_it_was_asked_to() -> None:
    log = EventLog(BLOCK, "mamba")
    tell(log, 4)
    async with feeding(log, Cache([], [])) as (feed, stream):
        feed.replay(2)
        await asyncio.sleep(0.01)
        assert stream.numbers() == [2, 3]
        feed.replay(4)
        await asyncio.sleep(0.01)
        assert stream.numbers() == [2, 3]


@pytest.mark.parametrize("asked", [0, -5, 9])
async def test_a_number_that_is_not_to_be_had_is_answered_with_everything(
    asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from node import event_log

    monkeypatch.setattr(event_log, "KEPT_BATCHES", 2)
    log = EventLog(BLOCK, "mamba")
    tell(log, 4)
    async with feeding(log, Cache(chain(3), [])) as (feed, stream):
        feed.replay(asked)
        await asyncio.sleep(0.01)
        assert stream.numbers() == [4]
        events = decode_batch(stream.sent[0].payload).events
        assert isinstance(events[0], AllBlocksCleared)
        assert len(events[1].block_hashes) == 3


async def test_events_wait_while_the_stream_is_full() -> None:
    log = EventLog(BLOCK, "mamba")
    tell(log, 3)
    async with feeding(log, Cache([], [])) as (feed, stream):
        stream.backlog_bytes = MAX_UNSENT_BYTES + 1
        feed.replay(0)
        await asyncio.sleep(0.02)
        assert stream.sent == []
        stream.backlog_bytes = 0
        await asyncio.sleep(0.02)
        assert stream.numbers() == [0, 1, 2]


async def test_a_feed_that_the_log_left_behind_begins_anew_but_not_at_once_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from node import event_log

    monkeypatch.setattr(event_log, "KEPT_BATCHES", 2)
    monkeypatch.setattr(event_feed, "RESTATE_EVERY_S", 0.2)
    log = EventLog(BLOCK, "mamba")
    async with feeding(log, Cache(chain(1), [])) as (feed, stream):
        stream.backlog_bytes = MAX_UNSENT_BYTES + 1
        feed.replay(0)
        tell(log, 5)
        stream.backlog_bytes = 0
        await asyncio.sleep(0.05)
        assert stream.numbers() == [5]
        stream.backlog_bytes = MAX_UNSENT_BYTES + 1
        tell(log, 5, first=5)
        stream.backlog_bytes = 0
        await asyncio.sleep(0.05)
        assert stream.numbers() == [5]
        await asyncio.sleep(0.25)
        assert stream.numbers() == [5, 11]


async def test_what_was_told_anew_for_one_gateway_serves_the_next_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from node import event_log

    monkeypatch.setattr(event_log, "KEPT_BATCHES", 2)
    log = EventLog(BLOCK, "mamba")
    streams = {"a": Stream(), "b": Stream()}
    feeds = EventFeeds(log, lambda: Cache(chain(1), []), streams.__getitem__)
    tell(log, 5)
    for gateway, stream in streams.items():
        feeds.replay(gateway, 1)
        await asyncio.sleep(0.02)
        assert stream.numbers() == [5]
    feeds.stop("a")
    tell(log, 1, first=5)
    await asyncio.sleep(0.02)
    assert streams["a"].numbers() == [5]
    assert streams["b"].numbers() == [5, 6]
    feeds.close()
    assert log.on_batch == []
