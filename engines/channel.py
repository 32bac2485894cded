"""Messages between a node and its engine process: msgpack behind a length of four bytes, over a socket pair."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import msgspec

from engines.protocol import Command, EngineEvent

MAX_MESSAGE_BYTES = 32 << 20

_length = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[EngineEvent] = msgspec.msgpack.Decoder(EngineEvent)


class ChannelError(Exception):
    """The other side sent something that is no message."""


def frame(message: Command | EngineEvent) -> bytes:
    """One message with its length in front. Raises ValueError above ``MAX_MESSAGE_BYTES``."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    return _length.pack(len(payload)) + payload


async def read_event(reader: asyncio.StreamReader) -> tuple[EngineEvent, int] | None:
    """The next event and its bytes, None at the end of the stream. Raises ChannelError."""
    try:
        payload = await reader.readexactly(_bounded(await reader.readexactly(_length.size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        return _events.decode(payload), len(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ChannelError(str(error)) from error


class EngineChannel:
    """The engine's end: blocking, one reading thread, any number of sending ones."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._reader = sock.makefile("rb")
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, event: EngineEvent) -> None:
        """Send one event; waits while the node does not read, which holds the engine back. Raises OSError."""
        data = frame(event)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> Command | None:
        """The next command, None once the node is gone. Raises ChannelError."""
        try:
            head = self._reader.read(_length.size)
            if len(head) < _length.size:
                return None
            size = _bounded(head)
            payload = self._reader.read(size)
        except ConnectionError:
            return None
        if len(payload) < size:
            return None
        try:
            return _commands.decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ChannelError(str(error)) from error


def _bounded(head: bytes) -> int:
    (size,) = _length.unpack(head)
    if size > MAX_MESSAGE_BYTES:
        raise ChannelError(f"a message of {size} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    return int(size)
