"""Events of an engine that the gateway did not start: a ZMQ subscription, and a replay of what it missed."""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from gateway.config import EngineEvents
from gateway.kv_index import MAX_SEQ, KvIndex
from gateway.kv_source import Source
from kvcache.kv_events import MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)

QUEUED_BATCHES = 10_000
REPLAY_SILENT_S = 5.0
_END = b"\xff" * 8


class EngineSubscriber:
    """Follows one publisher. ``run`` does so until cancelled; a publisher that goes away is waited for."""

    def __init__(self, events: EngineEvents, index: KvIndex) -> None:
        self._events = events
        self._index = index

    async def run(self) -> None:
        """Subscribe first, then ask for what came before: nothing falls between the two."""
        source = self._index.engine(self._events.publish, self._events.node_id)
        with zmq.asyncio.Context() as context, _socket(context, zmq.SUB, self._events.publish) as subscription:
            subscription.subscribe(b"")
            if source.sequence.applied >= 0 and not await self._same_start(context, source):
                self._index.engine_restarted(source)
            await self._replay(context, source)
            while True:
                frames = await subscription.recv_multipart()
                if len(frames) != 3 or not self._take(source, frames[1], frames[2], live=True):
                    log.warning("kv events: no batch from %s: %d frames", self._events.publish, len(frames))
                while source.sequence.missing is not None:
                    self._index.figures.gaps += 1
                    await self._replay(context, source)
                await asyncio.sleep(0)  # a receive that is ready does not yield, and there may be many

    def _take(self, source: Source, number: bytes, payload: bytes, *, live: bool) -> bool:
        seq = int.from_bytes(number, "big")
        if len(number) != 8 or seq > MAX_SEQ:
            return False
        self._index.engine_said(source, seq, payload, live=live)
        return True

    async def _replay(self, context: zmq.asyncio.Context, source: Source) -> None:
        """Ask for all that was not applied yet. What does not come is given up."""
        if self._events.replay is not None:
            self._index.figures.replays += 1
            with _socket(context, zmq.DEALER, self._events.replay) as dealer:
                await dealer.send_multipart((b"", (source.sequence.applied + 1).to_bytes(8, "big")))
                try:
                    await self._answers(dealer, source)
                except TimeoutError:
                    log.warning("kv events: no replay from %s within %g s", self._events.replay, REPLAY_SILENT_S)
        self._index.engine_gave_all(source)

    async def _same_start(self, context: zmq.asyncio.Context, source: Source) -> bool:
        """Whether the publisher still has the last batch that an earlier gateway applied, byte for byte."""
        if self._events.replay is None:
            return False
        with _socket(context, zmq.DEALER, self._events.replay) as dealer:
            await dealer.send_multipart((b"", source.sequence.applied.to_bytes(8, "big")))
            try:
                async with asyncio.timeout(REPLAY_SILENT_S):
                    frames = await dealer.recv_multipart()
            except TimeoutError:
                return False
        return len(frames) > 1 and self._index.engine_knows(source, int.from_bytes(frames[-2], "big"), frames[-1])

    async def _answers(self, dealer: zmq.asyncio.Socket, source: Source) -> None:
        """Take batches until the end is said. Some publishers send the topic too: the last two frames count."""
        while True:
            async with asyncio.timeout(REPLAY_SILENT_S):
                frames = await dealer.recv_multipart()
            if len(frames) < 2 or frames[-2] == _END or not self._take(source, frames[-2], frames[-1], live=False):
                return
            await asyncio.sleep(0)


def _socket(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
    return socket
