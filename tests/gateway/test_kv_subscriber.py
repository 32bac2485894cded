"""An engine's publisher on real sockets: late subscribers, lost batches, replays that work and that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from deploy.stack import free_port
from gateway import kv_subscriber
from gateway.config import ConfigError, EngineEvents
from gateway.kv_index import KvIndex
from gateway.kv_lookup import Held
from gateway.kv_source import Snapshot
from gateway.kv_subscriber import EngineSubscriber
from tests.gateway.test_kv_index import FULL, engine_batch, held, tokens

TOPIC = b"kv"


class Publisher:
    """As an engine: PUB of all that ``say`` gets, unless it is to be lost, and a ROUTER that replays what it kept."""

    def __init__(self, events: EngineEvents, *, topics: bool = True) -> None:
        self.events = events
        self.kept: dict[int, bytes] = {}
        self.requests: list[int] = []
        self.answering = True
        self._topics = topics
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(events.publish)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(events.replay)
        self._task = asyncio.create_task(self._serve())

    async def say(self, seq: int, payload: bytes, *, lost: bool = False, kept: bool = True) -> None:
        if kept:
            self.kept[seq] = payload
        if not lost:
            await self._pub.send_multipart((TOPIC, seq.to_bytes(8, "big"), payload))

    async def garbage(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            client, _, number = await self._router.recv_multipart()
            self.requests.append(int.from_bytes(number, "big"))
            if not self.answering:
                continue
            head = (client, b"", TOPIC) if self._topics else (client, b"")
            for seq, payload in self.kept.items():
                if seq >= self.requests[-1]:
                    await self._router.send_multipart((*head, seq.to_bytes(8, "big"), payload))
            await self._router.send_multipart((*head, b"\xff" * 8, b""))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(0)


def endpoints() -> EngineEvents:
    return EngineEvents("n", f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")


@asynccontextmanager
async def following(publisher: Publisher, snapshot: Snapshot | None = None) -> AsyncIterator[KvIndex]:
    index = KvIndex(FULL, "f")
    if snapshot is not None:
        index.restore(snapshot, 0.0)
    task = asyncio.create_task(EngineSubscriber(publisher.events, index).run())
    try:
        yield index
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()


async def becomes(index: KvIndex, what: Held | None, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while held(index) != what:  # noqa: ASYNC110 (it polls state that has no event)
            await asyncio.sleep(0.01)


async def subscribed(publisher: Publisher, index: KvIndex, seq: int) -> int:
    """Publish until the subscriber hears it; the next number."""
    async with asyncio.timeout(5.0):
        while index.figures.batches == 0 or index._engines[publisher.events.publish].sequence.applied < seq - 1:
            await publisher.say(seq, engine_batch(1, 1000 + seq))
            seq += 1
            await asyncio.sleep(0.02)
    return seq


@pytest.mark.parametrize("topics", [True, False])
async def test_a_late_subscriber_asks_for_what_came_before(topics: bool) -> None:
    publisher = Publisher(endpoints(), topics=topics)
    await publisher.say(0, engine_batch(1, 0))
    await publisher.say(1, engine_batch(3, 10))
    async with following(publisher) as index:
        await becomes(index, tokens(3))
        assert publisher.requests == [0]
        assert index.figures.gaps == 0


async def test_a_lost_batch_is_asked_for_again() -> None:
    publisher = Publisher(endpoints())
    async with following(publisher) as index:
        seq = await subscribed(publisher, index, 0)
        await publisher.say(seq, engine_batch(4, 0), lost=True)
        await publisher.say(seq + 1, engine_batch(2, 50))
        await becomes(index, tokens(4))
        assert publisher.requests == [0, seq]
        assert (index.figures.gaps, index.figures.rebuilds) == (1, 0)


async def test_a_batch_that_nobody_has_any_more_empties_what_is_known() -> None:
    publisher = Publisher(endpoints())
    async with following(publisher) as index:
        seq = await subscribed(publisher, index, 0)
        await publisher.say(seq, engine_batch(4, 0))
        await becomes(index, tokens(4))
        await publisher.say(seq + 2, engine_batch(2, 50))
        await becomes(index, tokens(2))
        assert index.figures.rebuilds == 1


async def test_a_replay_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriber, "REPLAY_SILENT_S", 0.1)
    publisher = Publisher(endpoints())
    publisher.answering = False
    async with following(publisher) as index:
        seq = await subscribed(publisher, index, 0)
        await publisher.say(seq + 5, engine_batch(2, 50))
        await becomes(index, tokens(2))
        assert index.figures.rebuilds >= 1


@pytest.mark.parametrize("anew", [False, True])
async def test_after_a_restart_it_goes_on_unless_the_engine_started_anew(anew: bool) -> None:
    before = KvIndex(FULL, "f")
    publisher = Publisher(endpoints())
    source = before.engine(publisher.events.publish, "n")
    for seq in range(3):
        before.engine_said(source, seq, engine_batch(4, 100 * seq), live=True)
    await publisher.say(2, engine_batch(4, 777 if anew else 200))
    await publisher.say(3, engine_batch(1, 888))
    async with following(publisher, before.dump(0.0)) as index:
        await becomes(index, tokens(4))
        async with asyncio.timeout(5):
            while index.figures.batches == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert publisher.requests == ([2, 0] if anew else [2, 3])
        assert index._engines[publisher.events.publish].sequence.applied == 3
        assert index.figures.rebuilds == (1 if anew else 0)


async def test_what_is_no_batch_is_passed_over() -> None:
    publisher = Publisher(endpoints())
    async with following(publisher) as index:
        seq = await subscribed(publisher, index, 0)
        await publisher.garbage(b"one frame")
        await publisher.garbage(TOPIC, b"short", engine_batch(4, 0))
        await publisher.garbage(TOPIC, b"\xff" * 8, engine_batch(4, 0))
        await publisher.say(seq, engine_batch(3, 50))
        await becomes(index, tokens(3))


@pytest.mark.parametrize(
    "text",
    [
        "n",
        "n=",
        "=tcp://h:1",
        "n=ipc://x",
        "n=tcp://h",
        "n=tcp://h:0",
        "n=tcp://h:1,tcp://h:2,tcp://h:3",
        "a b=tcp://h:1",
    ],
)
def test_a_flag_that_names_no_publisher_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        EngineEvents.parse(text)


def test_a_flag_names_a_node_its_publisher_and_its_replay() -> None:
    assert EngineEvents.parse("n=tcp://h:1") == EngineEvents("n", "tcp://h:1")
    assert EngineEvents.parse("n=tcp://[::1]:1,tcp://h:2") == EngineEvents("n", "tcp://[::1]:1", "tcp://h:2")
