"""uvicorn's WebSocket protocol for control streams: which certificate the other end shows, and messages at less cost.

Nodes say each token of an answer in a message of its own. Frames that are whole messages are read here; all others, and
everything before and after the stream is open, are the library's. Where messages come quickly, what comes within a
millisecond is read together: to wake for each would cost more than all that is done with it. Who listens is handed each
message as it is read, with no queue and no task between.
"""

from __future__ import annotations

from asyncio.transports import BaseTransport
from collections.abc import Callable

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.utils import apply_mask as apply_mask_slowly

from gateway.joining.door import CERTIFICATE

try:
    from websockets.speedups import apply_mask
except ImportError:  # the library was built without them
    apply_mask = apply_mask_slowly

MOST_SMALL = 64 << 10
"""Bytes of a frame that is kept here until it is whole; of a larger one the library gets each part as it comes."""
MOST_WAITING = 64
"""Messages that may wait to be read before the socket is left alone."""
MOST_UNSENT = 64 << 10
"""Bytes that may wait to be written while more is written at once."""
GATHER_S = 0.001
STREAM = "prfaas.stream"
"""Where in a scope's state the stream's protocol is."""
_WHOLE_BINARY = 0x80 | Opcode.BINARY
_MASKED = 0x80
_MASK_BYTES = 4


class StreamProtocol(WebSocketsSansIOProtocol):
    """TLS has checked the certificate against the roots by the time it is read here."""

    _held = b""
    """The beginning of a small frame."""
    _owed = 0
    """Bytes that the library still gets of a large one."""
    _in_parts = False
    """Whether a message is under way whose frames the library puts together."""
    _early = False
    """Whether the other end sent frames before it was let in: the library has them, and knows alone where one ends."""

    _hear: Callable[[bytes], None] | None = None
    _read_at = float("-inf")
    _gathering = False
    """Whether the socket is left alone until more has come."""

    def connection_made(self, transport: BaseTransport) -> None:
        """A connection was handed over by the HTTP protocol."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        shown = None if tls is None else tls.getpeercert(binary_form=True)
        self.app_state = {**self.app_state, STREAM: self} | ({CERTIFICATE: shown} if shown else {})

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """From now on ``hear`` binary messages as they are read, those that wait first. It must not raise.

        All else, as the stream's end, still comes by ASGI.
        """
        self._hear = hear
        for _ in range(self.queue.qsize()):
            event = self.queue.get_nowait()
            data = event.get("bytes")
            if isinstance(data, bytes):
                hear(data)
            else:
                self.queue.put_nowait(event)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def say(self, data: bytes) -> bool:
        """Write a binary message at once; False where it has to wait, or cannot be written any more."""
        if not self.writable.is_set() or self.conn.state is not State.OPEN or self.transport.is_closing():
            return False
        if self.transport.get_write_buffer_size() > MOST_UNSENT:  # transports pause only when they have tried to write
            return False
        self.conn.send_binary(data)
        self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them; the next ones may be gathered."""
        self._read(data)
        now = self.loop.time()
        if now - self._read_at < GATHER_S and not (self._gathering or self.transport.is_closing()):
            self._gathering = True
            self.transport.pause_reading()
            self.loop.call_later(GATHER_S, self._gathered)
        self._read_at = now

    def _gathered(self) -> None:
        self._gathering = False
        if not (self.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        at, end = 0, len(data)
        while at < end:
            if self.conn.state is not State.OPEN or self._early:
                self._early = self.handshake_initiated
                super().data_received(data[at:])
                return
            if self._owed:
                size = min(self._owed, end - at)
                self._owed -= size
                super().data_received(data[at : at + size])
                at += size
                continue
            head, size = _sizes(data, at)
            if size <= MOST_SMALL and at + size > end:
                break
            if data[at] == _WHOLE_BINARY and data[at + 1] & _MASKED and size <= MOST_SMALL and not self._in_parts:
                mask, begin = data[at + head - _MASK_BYTES : at + head], at + head
                message = apply_mask(data[begin : at + size], mask)
                at += size
                if self._hear is not None and not self.close_sent:
                    self._hear(message)
                else:
                    self.curr_msg_data_type, self.frames = "bytes", [message]
                    self.send_receive_event_to_app()
                continue
            if data[at] & 0x0F in (Opcode.CONT, Opcode.TEXT, Opcode.BINARY):
                self._in_parts = not data[at] & 0x80
            self._owed = size
        self._held = data[at:]

    def send_receive_event_to_app(self) -> None:
        """A message is whole: have it read; only where many wait, or large ones, the socket is left alone meanwhile."""
        if self._hear is not None and self.curr_msg_data_type == "bytes" and not self.close_sent:
            message, self.frames = b"".join(self.frames), []
            self._hear(message)
            return
        large = sum(map(len, self.frames)) > MOST_SMALL
        paused, self.read_paused = self.read_paused, True  # which keeps the library from doing so for each message
        super().send_receive_event_to_app()
        self.read_paused = paused
        if not paused and (large or self.queue.qsize() >= MOST_WAITING):
            self.read_paused = True
            self.transport.pause_reading()


def _sizes(data: bytes, at: int) -> tuple[int, int]:
    """Bytes of a frame's head, and of the whole frame; of a head that is not whole yet, one more than there is.

    https://www.rfc-editor.org/rfc/rfc6455#section-5.2
    """
    there = len(data) - at
    if there < 2:
        return there, there + 1
    length = data[at + 1] & 0x7F
    extended = 0 if length < 126 else 2 if length == 126 else 8
    head = 2 + extended + (_MASK_BYTES if data[at + 1] & _MASKED else 0)
    if there < head:
        return head, there + 1
    if extended:
        length = int.from_bytes(data[at + 2 : at + 2 + extended], "big")
    return head, head + length
