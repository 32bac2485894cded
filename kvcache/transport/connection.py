"""One socket of a peer: frames both ways straight from the loop's readiness callbacks, liveness, an end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.framing import FrameParser
from kvcache.session import MAX_DETAIL_CHARS, Liveness
from kvcache.transport.channel import TCP, Channel
from kvcache.transport.interface import PeerFrame, TransferFrame, TransportLimits
from kvcache.transport.link import LinkFigures
from kvcache.transport.probe import PROBE_TOKENS
from kvcache.transport.sendqueue import Outgoing, SendBatch, SendQueue
from kvcache.transport.shaping import Shape, forget_path
from kvcache.wire import Abort, Data, Frame, Hello, Ping, Pong, Proof, WireError, encode_frame

logger = logging.getLogger(__name__)

_TURN_BYTES = 4 << 20
CLOSING = "closing"
INITIAL_SEGMENTS = 10
"""What the kernel sends after a pause before it hears anything (RFC 6928), unless it keeps its window."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What a connection left behind.

    ``silent``: nothing had been heard for long. ``unfinished``: the payload that was under way; its memory is no longer
    written. ``unsent``: the frames that it had taken from the queue and not wholly sent.
    """

    cause: str
    silent: bool
    unfinished: Data | None
    unsent: list[Outgoing]


class ConnectionUser(Protocol):
    """The peer that a connection belongs to. ``queue`` is what all its connections send from."""

    queue: SendQueue

    def on_frame(self, connection: Connection, frame: PeerFrame) -> None:
        """A control frame of a transfer, or about lanes, has come."""

    def payload_target(self, connection: Connection, data: Data) -> Sequence[memoryview] | None:
        """Where a payload goes."""

    def on_data(self, connection: Connection, data: Data) -> None:
        """A payload lies in its target."""

    def received(self, connection: Connection, nbytes: int, now: float) -> None:
        """That many bytes have come."""

    def on_probed(self, token: int, now: float) -> None:
        """One ping of a probe was answered."""

    def on_blocked(self) -> None:
        """A connection begins, or ends, to wait for room in the kernel's buffer."""

    def on_connection_lost(self, connection: Connection, broken: Broken) -> None:
        """It is over."""

    def close(self, cause: str) -> None:
        """End all connections, telling the other side why."""

    def end(self, cause: str) -> None:
        """End all connections; the other side has asked for it."""


class Connection:
    """An established connection. All methods belong to the event loop's thread; there is no task behind it.

    ``user`` must be set before the loop runs again.
    """

    user: ConnectionUser

    def __init__(
        self, dialled: bool, version: int, channel: Channel, parser: FrameParser, limits: TransportLimits
    ) -> None:
        self.dialled = dialled
        """Whether this side opened it."""
        self.version = version
        self.blocked = False
        """Whether it waits for room in the kernel's buffer."""
        self.transport = channel.transport
        """What it goes by."""
        self._channel = channel
        self._parser = parser
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._batch = SendBatch()
        self._paused = False
        self._alive = True
        self.figures = LinkFigures(channel.sock)
        self._shape = Shape(channel.sock, limits.socket_buffer, limits.unsent_in_kernel)
        self._liveness = Liveness(self._loop.time(), limits.ping_every_s, limits.lost_after_s)
        parser.target = self._target
        self._channel.watch_readable(self._read)
        self._loop.call_soon(self._read)
        self._timer = self._loop.call_later(self._liveness.tick_s, self._tick)

    @property
    def alive(self) -> bool:
        """Whether it still stands."""
        return self._alive

    @property
    def is_lane(self) -> bool:
        """Whether it carries only what is submitted for it; all else goes by TCP."""
        return self.transport != TCP

    @property
    def receiving(self) -> Data | None:
        """The Data frame whose payload is under way into memory that the user named."""
        return self._parser.receiving

    # ---- sending

    def write(self, budget: int) -> None:
        """Send at most about ``budget`` bytes; where the kernel's buffer is full, its readiness goes on with it."""
        try:
            while budget > 0 and self._alive:
                views = self._batch.gather(self.user.queue, self)
                if not views:
                    self._set_blocked(False)
                    return
                count = self._channel.send(views)
                if count is None:
                    self._set_blocked(True)
                    return
                self.figures.sent_bytes += count
                budget -= count
                for item in self._batch.sent(count):
                    item.finish(self)
            if self._alive and self._batch:
                self._set_blocked(True)
        except OSError as error:
            self.end(f"connection broke: {error}")

    def _writable(self) -> None:
        self.write(_TURN_BYTES)

    def drop(self, item: Outgoing) -> None:
        """Nobody wants this frame any more: let go of its memory. Once begun it is completed from a copy."""
        self._batch.drop(item)

    def send(self, frame: TransferFrame | Ping | Pong) -> None:
        """Send a control frame over this very connection, ahead of all that waits; it is lost with it."""
        self._batch.push_own(encode_frame(frame, self.version))
        if not self.blocked:
            self.write(_TURN_BYTES)

    def _set_blocked(self, blocked: bool) -> None:
        if blocked and not self.blocked:
            self._channel.watch_writable(self._writable)
        elif self.blocked and not blocked:
            self._channel.watch_writable(None)
        if blocked != self.blocked:
            self.blocked = blocked
            self.user.on_blocked()

    def forget_path(self) -> int:
        """It is idle: let the kernel find out anew how fast the path is. Returns what it may send before it hears."""
        self.figures.sample()
        initial = INITIAL_SEGMENTS * self.figures.segment_bytes
        sock = self._channel.sock
        return max(initial, self.figures.window_bytes) if sock is not None and forget_path(sock) else initial

    @property
    def pace(self) -> float:
        """Bytes per second that the kernel sends at most; 0 without a limit."""
        return self._shape.pace

    def shape(self, pace: float) -> None:
        """Send at ``pace`` at most (0: no limit), with buffers for that rate, or for the one that was measured."""
        try:
            self._shape.set_pace(pace)
            self._shape.fit_buffers(self.figures.rtt_s, pace or self.figures.delivery_bytes_per_s)
        except OSError as error:
            logger.warning("event=kv_shape_failed cause=%s", error)

    # ---- receiving

    def pause(self) -> None:
        """Stop reading, after the frame at hand; harmless when repeated."""
        if not self._paused and self._alive:
            self._paused = True
            self._channel.watch_readable(None)

    def resume(self) -> None:
        """Read again; harmless when not paused."""
        if self._paused and self._alive:
            self._paused = False
            self._channel.watch_readable(self._read)
            self._loop.call_soon(self._read)

    def drop_payload(self) -> None:
        """Take back the memory of the payload under way: nothing is written there any more."""
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
                buffers = self._parser.get_buffers()
                count = self._channel.receive(buffers)
                if count is None:
                    break
                if count == 0:
                    self.end("closed by the peer")
                    return
                turn += count
                self._parser.buffer_updated(count)
                if count < sum(map(len, buffers)):
                    self._deliver_frames()  # the socket is empty: its next bytes call this again
                    break
        except WireError as error:
            self.user.close(f"sent what is no frame: {error}")
        except OSError as error:
            self.end(f"connection broke: {error}")
        except Exception as error:
            logger.exception("event=kv_handler_failed")
            self.user.close(f"handler failed: {type(error).__name__}")
        if turn:
            now = self._loop.time()
            self._liveness.heard(now)
            self.figures.received_bytes += turn
            self.user.received(self, turn, now)

    def _deliver_frames(self) -> bool:
        """Hand over all whole frames; False where reading must stop."""
        while not self._paused and self._alive:
            frame = self._parser.next_frame()
            if frame is None:
                return True
            self._deliver(frame)
        return False

    def _deliver(self, frame: Frame) -> None:
        if isinstance(frame, Data):
            self.user.on_data(self, frame)
        elif isinstance(frame, Ping):
            self.send(Pong(frame.token))
        elif isinstance(frame, Pong) and frame.token >= PROBE_TOKENS:
            self.user.on_probed(frame.token, self._loop.time())
        elif isinstance(frame, Pong):
            self._liveness.pong(frame, self._loop.time())
            self.figures.ping_rtt_s = self._liveness.rtt_s
        elif isinstance(frame, Abort) and not frame.transfer:
            self.user.end(f"closed by the peer: {frame.reason}: {frame.detail}")
        else:
            assert not isinstance(frame, Hello | Proof)
            self.user.on_frame(self, frame)

    def _target(self, data: Data) -> Sequence[memoryview] | None:
        return self.user.payload_target(self, data)

    # ---- life and end

    def farewell(self, cause: str) -> None:
        """Tell the other side that all is over, if that can be done at once."""
        if self._alive and self._batch.between_frames:
            frame = encode_frame(Abort(b"", CLOSING, cause[:MAX_DETAIL_CHARS]), self.version)
            try:
                self._channel.send([memoryview(frame)])
            except OSError as error:
                logger.debug("event=kv_farewell_failed cause=%s", error)

    def _tick(self) -> None:
        now = self._loop.time()
        ping = self._liveness.tick(now, suspended=self._paused)
        if self._liveness.lost(now):
            self.end(f"silent for {self._limits.lost_after_s} s", silent=True)
            return
        self.figures.sample()
        if ping is not None:
            self.send(ping)
        if self._alive:
            self._timer = self._loop.call_later(self._liveness.tick_s, self._tick)

    def end(self, cause: str, silent: bool = False) -> None:
        """Close it and tell its user; harmless when repeated."""
        if not self._alive:
            return
        self._alive = False
        self._timer.cancel()
        self._channel.watch_readable(None)
        self._channel.watch_writable(None)
        self._channel.close()
        unfinished = self._parser.receiving
        self._parser.discard_payload()
        self.user.on_connection_lost(self, Broken(cause, silent, unfinished, self._batch.clear()))
