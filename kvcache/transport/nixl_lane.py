"""Lanes through NIXL, for RDMA between hosts: each side writes into a ring of the other's registered memory.

Only the rings are registered and made known, never a pool. The two tell each other where they are over the connections
that they have already; then each proves itself once more over the lane, as over every other. Whoever can reach UCX's
own ports is not kept out by anything here: this is for networks whose hosts trust each other.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvcache.transport.channel import MAX_VIEWS, Channel
from kvcache.transport.nixl_agent import Flow, NixlAgent, split
from kvcache.transport.peer import Peer
from kvcache.transport.ring import RingError, RingReader, RingWriter
from kvcache.wire import Lane

logger = logging.getLogger(__name__)

RING_BYTES = 8 << 20
ANSWER_S = 3.0
MAX_METADATA_BYTES = 64 << 10


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where one side's ring is; an answer of no bytes refuses. ``token``, drawn by who dials, names the lane."""

    token: bytes
    metadata: bytes
    address: int
    nbytes: int
    answer: bool = False


_decoder = msgspec.msgpack.Decoder(Offer)


class NixlCarrier:
    """Lanes of one node by NIXL, with UCX as its ``ucx`` settings say. Create it on the event loop.

    Raises NixlMissing.
    """

    def __init__(self, transport: str, name: str, ucx: Mapping[str, str]) -> None:
        self.transport = transport
        self._agent = NixlAgent(name, ucx)
        self._loop = asyncio.get_running_loop()
        self._asked: dict[bytes, asyncio.Future[Offer]] = {}
        self._arrived: Callable[[Channel], None] = Channel.close
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, arrived: Callable[[Channel], None]) -> None:
        """Let peers dial this node. Raises OSError where UCX does not have what its settings name."""
        self._agent.start()
        self._arrived = arrived

    async def dial(self, peer: Peer) -> Channel:
        """A channel to a peer. Raises OSError."""
        token = os.urandom(16)
        answer = self._asked[token] = self._loop.create_future()
        end = await _End.make(self._agent, self.transport, token)
        try:
            peer.send(Lane(self.transport, end.offer(answer=False)))
            async with asyncio.timeout(ANSWER_S):
                return await end.join(peer, await answer)
        except BaseException:
            end.close()
            raise
        finally:
            del self._asked[token]

    def on_lane(self, peer: Peer, frame: Lane) -> None:
        """A peer says where its ring is: because it dials, or answers."""
        try:
            offer = _decoder.decode(frame.offer)
        except msgspec.MsgspecError as error:
            logger.info("event=kv_lane_refused transport=%s cause=%s", self.transport, error)
            return
        if offer.answer:
            asked = self._asked.get(offer.token)
            if asked is not None and not asked.done():
                asked.set_result(offer)
            return
        task = self._loop.create_task(self._answer(peer, offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Accept nobody any more; channels are closed by then. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._agent.close)

    async def _answer(self, peer: Peer, offer: Offer) -> None:
        end = await _End.make(self._agent, self.transport, offer.token)
        try:
            channel = await end.join(peer, offer)
        except OSError as error:
            end.close()
            logger.info("event=kv_lane_refused transport=%s cause=%s", self.transport, error)
            peer.send(Lane(self.transport, msgspec.msgpack.encode(Offer(offer.token, b"", 0, 0, answer=True))))
            return
        peer.send(Lane(self.transport, end.offer(answer=True)))
        self._arrived(channel)


class _End:
    """This side's two rings of one lane: the one that the peer fills, and the mirror of the peer's."""

    def __init__(self, agent: NixlAgent, transport: str, token: bytes) -> None:
        self.agent = agent
        self.transport = transport
        self.token = token
        self.maps = agent.take_memory() or (mmap.mmap(-1, RING_BYTES), mmap.mmap(-1, RING_BYTES))
        self.memory = tuple(memoryview(each) for each in self.maps)
        self.metadata = b""
        self._registered: list[Any] = []
        self._closed = False

    @classmethod
    async def make(cls, agent: NixlAgent, transport: str, token: bytes) -> _End:
        """Register both. Raises OSError."""
        end = cls(agent, transport, token)

        def register(nixl: Any) -> bytes:
            for each in end.maps:
                end._registered.append(nixl.register_memory([(_address(each), RING_BYTES, 0, "")], "DRAM"))
            return bytes(nixl.get_partial_agent_metadata(end._registered[0], True, ["UCX"]))

        try:
            end.metadata = await asyncio.wrap_future(agent.call(register))
        except Exception as error:
            end.close()
            raise OSError(f"NIXL does not register memory: {error}") from error
        return end

    def offer(self, answer: bool) -> bytes:
        return msgspec.msgpack.encode(Offer(self.token, self.metadata, _address(self.maps[0]), RING_BYTES, answer))

    async def join(self, peer: Peer, offer: Offer) -> Channel:
        """Raises OSError for an offer that is not of this peer's agent, or of another size."""
        if offer.nbytes != RING_BYTES or len(offer.metadata) > MAX_METADATA_BYTES or len(offer.token) != 16:
            raise RingError(f"a ring of {RING_BYTES} bytes belongs there, {offer.nbytes} are offered")
        wanted = agent_name(peer.identity.node_id, peer.identity.incarnation)

        def add(nixl: Any) -> None:
            found = nixl.add_remote_agent(offer.metadata)
            name = found.decode() if isinstance(found, bytes) else found
            if name != wanted:
                nixl.remove_remote_agent(name)
                raise RingError(f"the agent of {wanted} belongs there, {name} is offered")

        try:
            await asyncio.wrap_future(self.agent.call(add))
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"NIXL does not reach the peer: {error}") from error
        flow = Flow(self.token, wanted, (_address(self.maps[1]), offer.address), lambda word, count: None)
        channel = NixlChannel(self, flow)
        self.agent.add(flow)
        return channel

    def close(self) -> None:
        """Give both back. Idempotent."""
        if self._closed:
            return
        self._closed = True

        def release(nixl: Any) -> None:
            try:
                for each in self._registered:
                    nixl.deregister_memory(each)
            finally:
                for view in self.memory:
                    view.release()
                self.agent.keep_memory(self.maps)

        self.agent.call(release)


class NixlChannel(Channel):
    """Bytes copied into the mirror, written to the peer's ring by NIXL, and copied out there."""

    def __init__(self, end: _End, flow: Flow) -> None:
        self.transport = end.transport
        self._end = end
        self._flow = flow
        self._reader = RingReader(end.memory[0])
        self._writer = RingWriter(end.memory[1])
        self._loop = asyncio.get_running_loop()
        self._readable: Callable[[], None] | None = None
        self._writable: Callable[[], None] | None = None
        self._failure: OSError | None = None
        self._closed = False
        flow.heard = lambda word, count: _threadsafe(self._loop, self._hear, word, count)

    @property
    def buffered(self) -> bool:
        return self._reader.available > 0

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        if self._reader.available:
            count = self._reader.take(buffers[:MAX_VIEWS])
            if back := self._reader.give_back():
                self._end.agent.say(self._flow, b"f", back)
            return count
        if self._failure is not None:
            raise self._failure
        return None

    def send(self, views: Sequence[memoryview]) -> int | None:
        if self._failure is not None:
            raise self._failure
        at = self._writer.at
        count = self._writer.put(views[:MAX_VIEWS])
        if not count:
            return None
        first = min(count, RING_BYTES - at)
        self._end.agent.write(self._flow, split([(at, first), (0, count - first)]))
        return count

    def watch_readable(self, callback: Callable[[], None] | None) -> None:
        self._readable = callback

    def watch_writable(self, callback: Callable[[], None] | None) -> None:
        self._writable = callback
        if callback is not None and self._writer.room:
            self._loop.call_soon(self._hear, b"", 0)

    def finish(self) -> None:
        """The end of a lane shows by its peer's connections, or by silence: there is nothing to say."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end.agent.drop(self._flow)
            self._end.close()

    def _hear(self, word: bytes, count: int) -> None:
        if self._closed:
            return
        try:
            if word == b"w":
                self._reader.arrived(count)
            elif word == b"f":
                self._writer.freed(count)
            elif word == b"!":
                raise ConnectionResetError("NIXL could not write to the peer")
        except OSError as error:
            self._failure = error
        over = self._failure is not None
        if self._readable is not None and (over or self._reader.available):
            self._readable()
        if self._writable is not None and not self._closed and (over or self._writer.room):
            self._writable()


def agent_name(node_id: str, incarnation: str) -> str:
    """What a node's agent is called."""
    return f"{node_id}.{incarnation}"


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    """What comes when the loop is gone already is for nobody."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        logger.debug("event=nixl_heard_late")
