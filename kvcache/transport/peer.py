"""A node at the other end: several connections, one queue of frames for all of them, one end.

Frames stripe over the connections as each has room. A lost connection gives back what it had taken and not wholly sent;
what it had sent may or may not have arrived, which only a transfer's acknowledgements tell: its handler hears of the
loss and sends again. A peer without any connection waits a little for a new one before it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvcache.control import LinkReport
from kvcache.session import PeerIdentity
from kvcache.transfer import TransferViolation
from kvcache.transport.connection import Broken, Connection
from kvcache.transport.interface import FrameHandler, PeerFrame, PeerLost, TransferFrame, TransportLimits
from kvcache.transport.link import PeerFigures, least_rtt_s
from kvcache.transport.measure import PathMeasure
from kvcache.transport.sendqueue import BATCH_BYTES, Outgoing, SendQueue
from kvcache.wire import Abort, Data, Lane, Open, encode_frame

logger = logging.getLogger(__name__)

IDLE_BYTES = 4096


class Peer:
    """All methods belong to the event loop's thread. ``on_end`` is called once, before the handler's ``on_lost``.

    ``on_short`` is called whenever a connection is lost and the peer is not, ``on_lane`` with what it says of lanes.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        version: int,
        handler: FrameHandler,
        limits: TransportLimits,
        on_short: Callable[[Peer], None],
        on_end: Callable[[Peer], None],
        on_lane: Callable[[Peer, Lane], None],
    ) -> None:
        self.identity = identity
        self.queue = SendQueue()
        self.busy = False
        self._version = version
        self._handler = handler
        self._limits = limits
        self._on_short = on_short
        self._on_end = on_end
        self._on_lane = on_lane
        self._loop = asyncio.get_running_loop()
        self._connections: list[Connection] = []
        self._lanes: list[Connection] = []
        self._turn = 0
        self._sent_before = 0
        self._paused = False
        self._cause: str | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._figures = PeerFigures(identity.node_id, self._loop.time())
        self._measure = PathMeasure(self.queue, self._figures, version)

    @property
    def alive(self) -> bool:
        """Whether it is not lost; it may be without a connection for a short while."""
        return self._cause is None

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Those that stand, lanes left out."""
        return tuple(self._connections)

    def lanes(self, transport: str) -> tuple[Connection, ...]:
        """Those that go by another transport than TCP: they carry only what is submitted for them."""
        return tuple(lane for lane in self._lanes if lane.transport == transport)

    @property
    def lane_count(self) -> int:
        """Lanes that stand, of all transports."""
        return len(self._lanes)

    @property
    def way_s(self) -> float:
        """How long a frame is on its way, nothing else under way: half the shortest round trip; 0 while unmeasured."""
        return least_rtt_s([connection.figures for connection in self._connections]) / 2

    @property
    def pace(self) -> float:
        """Bytes per second that the kernel sends at most over all connections; 0 without a limit."""
        return sum(connection.pace for connection in self._connections)

    def report(self) -> LinkReport:
        """Figures of all connections since the peer began."""
        present = [connection.figures for connection in self._connections]
        return self._figures.report(present, self.pace, self._loop.time())

    def look(self) -> None:
        """Set ``busy``: whether it has sent, or had something to send, since this was last called; watch delivery."""
        present = [connection.figures for connection in self._connections]
        sent = self._figures.sent_bytes(present)
        was_busy = self.busy
        self.busy = bool(self.queue) or sent - self._sent_before > IDLE_BYTES
        self._sent_before = sent
        if self.busy or was_busy:
            for figures in present:
                figures.sample()
        self._measure.look(self._connections, self.pace)

    def add(self, connection: Connection) -> None:
        """Take one more connection into use."""
        assert self._cause is None
        connection.user = self
        if self._grace is not None and not connection.is_lane:
            self._grace.cancel()
            self._grace = None
        if self._paused:
            connection.pause()
        (self._lanes if connection.is_lane else self._connections).append(connection)
        self.on_blocked()
        self._flush()

    # ---- sending

    def send(self, frame: PeerFrame) -> None:
        """Send a control frame as soon as can be; it overtakes queued Data frames. Does nothing once the peer is lost.

        A peer that lets too many pile up is closed. Raises ValueError for a frame too large to be read.
        """
        if self._cause is not None:
            return
        self.queue.push_control(encode_frame(frame, self._version))
        self._flush()
        if self.queue.control_bytes > self._limits.control_backlog:
            self.end(f"reads too slowly: {self.queue.control_bytes} bytes of control frames wait for it")

    def send_over(self, frame: TransferFrame, connections: Sequence[Connection]) -> None:
        """Send a copy of a control frame over each of these, ahead of what waits; it is lost with its connection.

        What goes over these ``only`` cannot overtake the frame.
        """
        for connection in connections:
            connection.send(frame)

    def submit(
        self,
        data: Data,
        payload: Sequence[bytes | bytearray | memoryview],
        left: int = 0,
        only: tuple[Connection, ...] | None = None,
    ) -> Outgoing:
        """Queue one piece, ``data.wire_bytes`` of payload in order; that memory is referred to until the frame has a
        ``carrier``, is dropped or the peer is lost.

        ``left`` is what its transfer has still to send, this piece included: transfers with less go first. A frame that
        may go over some connections ``only`` is lost with the last: its ``carrier`` is not alive then. Raises PeerLost;
        ValueError where the payload is not what the header says.
        """
        views = [memoryview(part).cast("B") for part in payload]
        if sum(map(len, views)) != data.wire_bytes:
            raise ValueError(f"payload of {sum(map(len, views))} bytes, the header says {data.wire_bytes}")
        if self._cause is not None:
            raise self._loss(self._cause)
        self._measure.give_up()
        item = self.queue.push_data(data.transfer, encode_frame(data, self._version), views, left, only)
        if only is not None and not any(connection.alive for connection in only):
            self._withdraw(only[-1])
        self._flush()
        return item

    async def carried(self, item: Outgoing) -> Connection:
        """Wait until a connection has taken all of a submitted frame. Raises PeerLost."""
        while item.carrier is None:
            if self._cause is not None:
                raise self._loss(self._cause)
            if item.waiter is None or item.waiter.done():
                item.waiter = self._loop.create_future()
            await item.waiter
        return item.carrier

    def drop(self, item: Outgoing) -> None:
        """Nobody wants this frame any more: afterwards its memory is not referred to. Harmless when it has gone."""
        if item.carrier is None and not self.queue.remove(item):
            for connection in self._all:
                connection.drop(item)

    def unpin(self, transfer: bytes) -> None:
        """What waits of this transfer may go over any connection from now on."""
        self.queue.unpin(transfer)
        self._flush()

    def forget(self, transfer: bytes) -> None:
        """This transfer sends nothing any more."""
        self.queue.forget(transfer)

    def _flush(self) -> None:
        """Spread what waits over the connections that have room, a batch each in turn."""
        while self.queue:
            free = [c for c in self._all if not c.blocked and self.queue.has_for(c)]
            if not free:
                return
            self._turn += 1
            free[self._turn % len(free)].write(BATCH_BYTES)

    def _withdraw(self, lost: Connection) -> None:
        """Give up what may no longer go over any connection."""
        for item in self.queue.withdraw():
            item.finish(lost)

    # ---- measuring

    def probe(self, nbytes: int, on_measured: Callable[[], None]) -> bool:
        """Measure the idle path with about ``nbytes`` and call ``on_measured`` when the report holds what came of it.

        False where it is not idle, or is being measured. Whatever is submitted meanwhile ends the probe.
        """
        if self.busy or not self._measure.probe(self._connections, nbytes, on_measured):
            return False
        self._flush()
        return True

    def on_probed(self, token: int, now: float) -> None:
        """A ping of a probe was answered."""
        self._measure.answered(token, now, self.pace)

    def on_blocked(self) -> None:
        """A connection has begun or ended to wait for the kernel."""
        self._measure.waits(bool(self._connections) and all(c.blocked for c in self._connections))

    # ---- receiving

    def pause(self) -> None:
        """Stop reading, after the frames at hand, so that the sender's buffers fill; harmless when repeated.

        The peer is not taken for lost meanwhile, nor is a silent loss noticed: resume soon.
        """
        self._paused = True
        for connection in self._all:
            connection.pause()

    def resume(self) -> None:
        """Read again; harmless when not paused."""
        self._paused = False
        for connection in self._all:
            connection.resume()

    def drop_payload(self, transfer: bytes, seq: int | None = None) -> None:
        """Take back the memory that ``payload_target`` named for this transfer, or for this piece of it: nothing is
        written there any more.
        """
        for connection in self._all:
            receiving = connection.receiving
            if receiving is not None and receiving.transfer == transfer and seq in (None, receiving.seq):
                connection.drop_payload()

    # ---- what a connection says

    def on_frame(self, connection: Connection, frame: PeerFrame) -> None:
        """Hand a control frame to the handler, or to whoever looks after lanes."""
        if isinstance(frame, Lane):
            self._on_lane(self, frame)
            return
        try:
            self._handler.on_frame(self, frame)
        except TransferViolation as violation:
            if isinstance(frame, Open):
                raise
            self._violated(frame.transfer, violation)

    def payload_target(self, connection: Connection, data: Data) -> Sequence[memoryview] | None:
        """Ask the handler for memory."""
        try:
            return self._handler.payload_target(self, data)
        except TransferViolation as violation:
            self._violated(data.transfer, violation)
            return None

    def on_data(self, connection: Connection, data: Data) -> None:
        """Tell the handler that a payload is there."""
        try:
            self._handler.on_data(self, data)
        except TransferViolation as violation:
            self._violated(data.transfer, violation)

    def received(self, connection: Connection, nbytes: int, now: float) -> None:
        """Count bytes that came over the network: they tell how fast it is."""
        if not connection.is_lane:
            self._figures.meter.add(nbytes, now)

    def on_connection_lost(self, connection: Connection, broken: Broken) -> None:
        """Put back what was not sent, and let the handler send again what may not have arrived."""
        if connection.is_lane:
            self._lanes.remove(connection)
        else:
            self._figures.retire(connection.figures)
            self._connections.remove(connection)
        self._measure.give_up()
        self.on_blocked()
        self.queue.put_back(broken.unsent)
        self._withdraw(connection)
        if self._cause is not None:
            return
        logger.info(
            "event=kv_connection_lost peer=%s transport=%s left=%d cause=%s",
            self._name,
            connection.transport,
            len(self._connections),
            broken.cause,
        )
        if not self._connections and self._grace is None:
            grace = self._limits.resume_s - (self._limits.lost_after_s if broken.silent else 0.0)
            self._grace = self._loop.call_later(max(0.0, grace), self.end, broken.cause)
        self._loop.call_soon(self._broken, connection, broken.unfinished)

    def _broken(self, connection: Connection, unfinished: Data | None) -> None:
        if self._cause is None:
            self._on_short(self)
            self._handler.on_broken(self, connection, unfinished)
            self._flush()

    def _violated(self, transfer: bytes, violation: TransferViolation) -> None:
        """End the transfer on both sides."""
        abort = Abort(transfer, "violation", str(violation))
        logger.warning("event=kv_violation peer=%s transfer=%s cause=%s", self._name, transfer.hex(), violation)
        self.send(abort)
        self._handler.on_frame(self, abort)

    # ---- the end

    def close(self, cause: str) -> None:
        """End it, telling the other side why if that can be done at once; harmless when repeated."""
        if self._cause is None:
            for connection in self._connections:
                connection.farewell(cause)
        self.end(cause)

    def end(self, cause: str) -> None:
        """It is lost: end what is left of it; harmless when repeated."""
        if self._cause is not None:
            return
        self._cause = cause
        if self._grace is not None:
            self._grace.cancel()
        self._measure.give_up()
        for connection in self._all:
            connection.end(cause)
        for item in self.queue.clear():
            if item.waiter is not None and not item.waiter.done():
                item.waiter.set_exception(self._loss(cause))
        logger.info("event=kv_peer_lost peer=%s incarnation=%s cause=%s", self._name, self.identity.incarnation, cause)
        self._on_end(self)
        self._loop.call_soon(self._handler.on_lost, self, cause)

    @property
    def _all(self) -> list[Connection]:
        return [*self._lanes, *self._connections]

    def _loss(self, cause: str) -> PeerLost:
        return PeerLost(f"{self._name}: {cause}")

    @property
    def _name(self) -> str:
        return self.identity.node_id
