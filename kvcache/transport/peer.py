"""One established connection to one peer: frames both ways, liveness, an end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvcache.control import LinkReport
from kvcache.framing import FrameParser
from kvcache.session import MAX_DETAIL_CHARS, Liveness, PeerIdentity
from kvcache.transfer import TransferViolation
from kvcache.transport.channel import Channel
from kvcache.transport.interface import FrameHandler, PeerLost, TransferFrame, TransportLimits
from kvcache.transport.link import LinkFigures
from kvcache.transport.sendqueue import SendQueue
from kvcache.wire import Abort, Data, Frame, Hello, Open, Ping, Pong, Proof, WireError, encode_frame

logger = logging.getLogger(__name__)

_TURN_BYTES = 4 << 20
_YIELD_BYTES = 1 << 20
CLOSING = "closing"


class Peer:
    """A node at the other end. All methods belong to the event loop's thread.

    Reading and writing act on the socket straight from the loop's readiness callbacks; there is no task per peer.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        dialled: bool,
        version: int,
        channel: Channel,
        parser: FrameParser,
        handler: FrameHandler,
        limits: TransportLimits,
        on_end: Callable[[Peer], None],
    ) -> None:
        self.identity = identity
        self.dialled = dialled
        """Whether this side opened the connection."""
        self._version = version
        self._channel = channel
        self._fd = channel.sock.fileno()
        self._parser = parser
        self._handler = handler
        self._limits = limits
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._queue = SendQueue()
        self._blocked = False
        self._unyielded = 0
        self._paused = False
        self._cause: str | None = None
        self._figures = LinkFigures(channel.sock)
        self._liveness = Liveness(self._loop.time(), limits.ping_every_s, limits.lost_after_s)
        parser.target = self._target
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)
        self._timer = self._loop.call_later(self._liveness.tick_s, self._tick)

    @property
    def alive(self) -> bool:
        """Whether the connection still stands."""
        return self._cause is None

    @property
    def rtt_s(self) -> float:
        """Round trip: the kernel's estimate, or the last ping's; 0 before the first measurement."""
        return self._figures.rtt_s(self._liveness.rtt_s)

    def report(self) -> LinkReport:
        """Figures of this connection since it began."""
        return self._figures.report(self.identity.node_id, self._liveness.rtt_s)

    # ---- sending

    def send(self, frame: TransferFrame) -> None:
        """Send a control frame as soon as can be; it overtakes queued Data frames. Does nothing once the peer is lost.

        A peer that lets too many pile up is closed. Raises ValueError for a frame too large to be read.
        """
        self._send(frame)

    async def send_data(self, data: Data, payload: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send one piece, ``data.wire_bytes`` of payload in order; returns when that memory is no longer referred to.

        Frames of one transfer keep the order of the calls; transfers take turns. When cancelled, a frame already begun
        is completed from a copy. Raises PeerLost; ValueError where the payload is not what the header says.
        """
        views = [memoryview(part).cast("B") for part in payload]
        if sum(map(len, views)) != data.wire_bytes:
            raise ValueError(f"payload of {sum(map(len, views))} bytes, the header says {data.wire_bytes}")
        if self._cause is not None:
            raise PeerLost(f"{self.identity.node_id}: {self._cause}")
        waiter = self._loop.create_future()
        item = self._queue.push_data(data.transfer, encode_frame(data, self._version), views, waiter)
        self._flush()
        try:
            if waiter.done() and waiter.exception() is None:
                # A waiter that is done does not yield: without this a fast link would starve the loop.
                self._unyielded += data.wire_bytes
                if self._unyielded >= _YIELD_BYTES:
                    self._unyielded = 0
                    await asyncio.sleep(0)
            await waiter
        except asyncio.CancelledError:
            self._queue.drop(item)
            raise

    def _send(self, frame: Frame) -> None:
        if self._cause is not None:
            return
        self._queue.push_control(encode_frame(frame, self._version))
        self._flush()
        if self._queue.control_bytes > self._limits.control_backlog:
            self._end(f"reads too slowly: {self._queue.control_bytes} bytes of control frames wait for it")

    def _flush(self) -> None:
        if not self._blocked and self._cause is None:
            self._write()

    def _write(self) -> None:
        """Send until nothing is left or the socket is full; then its readiness calls this again."""
        budget = _TURN_BYTES
        try:
            while budget > 0:
                views = self._queue.gather()
                if not views:
                    self._set_blocked(False)
                    return
                count = self._channel.send(views)
                if count is None:
                    break
                self._figures.sent(count)
                budget -= count
                for item in self._queue.sent(count):
                    assert item.waiter is not None
                    if not item.waiter.done():
                        item.waiter.set_result(None)
        except OSError as error:
            self._end(f"connection broke: {error}")
            return
        self._set_blocked(True)

    def _set_blocked(self, blocked: bool) -> None:
        if blocked and not self._blocked:
            self._loop.add_writer(self._fd, self._write)
        elif self._blocked and not blocked:
            self._loop.remove_writer(self._fd)
        self._blocked = blocked

    # ---- receiving

    def pause(self) -> None:
        """Stop reading, after the frame at hand, so that the sender's buffers fill; harmless when repeated.

        The peer is not taken for lost meanwhile, nor is a silent loss noticed: resume soon.
        """
        if not self._paused and self._cause is None:
            self._paused = True
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        """Read again; harmless when not paused."""
        if self._paused and self._cause is None:
            self._paused = False
            self._loop.add_reader(self._fd, self._read)
            self._loop.call_soon(self._read)

    def drop_payload(self, transfer: bytes) -> None:
        """Take back the memory that ``payload_target`` named for this transfer: nothing is written there any more."""
        receiving = self._parser.receiving
        if receiving is not None and receiving.transfer == transfer:
            self._parser.discard_payload()

    def _read(self) -> None:
        """Deliver the frames at hand, then read more, for one turn of the loop."""
        turn = 0
        try:
            while self._deliver_frames():
                if turn >= _TURN_BYTES:
                    if self._channel.buffered:
                        self._loop.call_soon(self._read)
                    break
                count = self._channel.receive(self._parser.get_buffers())
                if count is None:
                    break
                if count == 0:
                    self._end("closed by the peer")
                    return
                turn += count
                self._parser.buffer_updated(count)
        except WireError as error:
            self.close(f"sent what is no frame: {error}")
        except OSError as error:
            self._end(f"connection broke: {error}")
        except Exception as error:
            logger.exception("event=kv_handler_failed peer=%s", self.identity.node_id)
            self.close(f"handler failed: {type(error).__name__}")
        if turn:
            now = self._loop.time()
            self._liveness.heard(now)
            self._figures.received(turn, now)

    def _deliver_frames(self) -> bool:
        """Hand over all whole frames; False where reading must stop."""
        while not self._paused and self._cause is None:
            frame = self._parser.next_frame()
            if frame is None:
                return True
            self._deliver(frame)
        return False

    def _deliver(self, frame: Frame) -> None:
        if isinstance(frame, Ping):
            self._send(Pong(frame.token))
        elif isinstance(frame, Pong):
            self._liveness.pong(frame, self._loop.time())
        elif isinstance(frame, Abort) and not frame.transfer:
            self._end(f"closed by the peer: {frame.reason}: {frame.detail}")
        elif isinstance(frame, Data):
            try:
                self._handler.on_data(self, frame)
            except TransferViolation as violation:
                self._violated(frame.transfer, violation)
        else:
            assert not isinstance(frame, Hello | Proof)
            try:
                self._handler.on_frame(self, frame)
            except TransferViolation as violation:
                if isinstance(frame, Open):
                    raise
                self._violated(frame.transfer, violation)

    def _target(self, data: Data) -> Sequence[memoryview] | None:
        try:
            return self._handler.payload_target(self, data)
        except TransferViolation as violation:
            self._violated(data.transfer, violation)
            return None

    def _violated(self, transfer: bytes, violation: TransferViolation) -> None:
        """End the transfer on both sides."""
        abort = Abort(transfer, "violation", str(violation))
        logger.warning("event=kv_violation peer=%s transfer=%s cause=%s", self._names()[0], transfer.hex(), violation)
        self.send(abort)
        self._handler.on_frame(self, abort)

    # ---- life and end

    def close(self, cause: str) -> None:
        """End the connection, telling the peer why if that can be done at once; harmless when repeated."""
        if self._cause is None and self._queue.between_frames:
            farewell = encode_frame(Abort(b"", CLOSING, cause[:MAX_DETAIL_CHARS]), self._version)
            try:
                self._channel.send([memoryview(farewell)])
            except OSError as error:
                logger.debug("event=kv_farewell_failed peer=%s cause=%s", self.identity.node_id, error)
        self._end(cause)

    def _tick(self) -> None:
        now = self._loop.time()
        ping = self._liveness.tick(now, suspended=self._paused)
        if self._liveness.lost(now):
            self._end(f"silent for {self._limits.lost_after_s} s")
            return
        self._figures.sample()
        if ping is not None:
            self._send(ping)
        if self._cause is None:
            self._timer = self._loop.call_later(self._liveness.tick_s, self._tick)

    def _end(self, cause: str) -> None:
        if self._cause is not None:
            return
        self._cause = cause
        self._timer.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._channel.close()
        self._parser.discard_payload()
        for item in self._queue.clear():
            assert item.waiter is not None
            if not item.waiter.done():
                item.waiter.set_exception(PeerLost(f"{self.identity.node_id}: {cause}"))
        logger.info("event=kv_peer_lost peer=%s incarnation=%s cause=%s", *self._names(), cause)
        self._on_end(self)
        self._loop.call_soon(self._handler.on_lost, self, cause)

    def _names(self) -> tuple[str, str]:
        return self.identity.node_id, self.identity.incarnation
