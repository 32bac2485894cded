"""Events of the prefix cache over ZMQ, as vLLM publishes them: PUB of (topic, number, batch), a ROUTER to ask again.

ZMQ knows no credentials here, and batches hold the token ids of prompts: who reaches the port can read them.
"""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from node.config import ConfigError, EventEndpoints
from node.event_log import KEPT_BATCHES, EventLog

log = logging.getLogger(__name__)

PUB_HWM = 100_000
END = (-1).to_bytes(8, "big", signed=True)
_REQUEST_BYTES = 1024


class EventSocket:
    """Both sockets of one node. ``run`` answers replays until cancelled; ``close`` is due at the end."""

    def __init__(self, endpoints: EventEndpoints, topic: str, events: EventLog) -> None:
        """Binds. Raises ConfigError where an endpoint can't be bound."""
        self._topic = topic.encode()
        self._events = events
        self._context = zmq.Context()
        self._pub = self._socket(zmq.PUB, endpoints.publish, "--kv-events-endpoint", PUB_HWM)
        self._replay: zmq.asyncio.Socket | None = None
        if endpoints.replay is not None:
            router = self._socket(zmq.ROUTER, endpoints.replay, "--kv-events-replay-endpoint", KEPT_BATCHES + 1)
            self._replay = zmq.asyncio.Socket.shadow(router)
            self._router = router  # a socket that nobody refers to closes, whatever shadows it
        events.on_batch.append(self._publish)

    def _socket(self, kind: int, endpoint: str, flag: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(f"{flag}: {endpoint} cannot be bound: {error.strerror}; name another address") from error
        return socket

    def _publish(self, seq: int, payload: bytes) -> None:
        """A subscriber that does not keep up misses batches, and sees it by their numbers; nobody waits for it."""
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), zmq.NOBLOCK, copy=True)

    async def run(self) -> None:
        """Answer requests for what was missed."""
        if self._replay is None:
            await asyncio.Event().wait()
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                await self._answer(frames[0], int.from_bytes(frames[2], "big"))
            else:
                log.warning("kv events: a request for a replay of %d frames that is none", len(frames))

    async def _answer(self, client: bytes, start_seq: int) -> None:
        assert self._replay is not None
        for seq, payload in self._events.kept_from(start_seq):
            await self._replay.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        await self._replay.send_multipart((client, b"", self._topic, END, b""))

    def close(self) -> None:
        """Let go of both ports. Idempotent."""
        self._context.destroy(0)
