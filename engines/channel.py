"""Messages between a node and its engine process: msgpack behind a length of four bytes, over a socket pair."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

from engines.protocol import Command, EngineEvent

MAX_MESSAGE_BYTES = 32 << 20

_length = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[EngineEvent] = msgspec.msgpack.Decoder(EngineEvent)

Received = TypeVar("Received")


class ChannelError(Exception):
    """The other side sent something that is no message."""


def frame(message: msgspec.Struct) -> bytes:
    """One message with its length in front. Raises ValueError above ``MAX_MESSAGE_BYTES``."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    return _length.pack(len(payload)) + payload


async def read_event(reader: asyncio.StreamReader) -> tuple[EngineEvent, int] | None:
    """The next event and its bytes, None at the end of the stream. Raises ChannelError."""
    return await read_message(reader, _events)


async def read_message(
    reader: asyncio.StreamReader, kinds: msgspec.msgpack.Decoder[Received]
) -> tuple[Received, int] | None:
    """The next message of these kinds and its bytes, None at the end of the stream. Raises ChannelError."""
    try:
        payload = await reader.readexactly(_bounded(await reader.readexactly(_length.size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        return kinds.decode(payload), len(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ChannelError(str(error)) from error


class MessageChannel(Generic[Received]):
    """A blocking end: one reading thread, any number of sending ones."""

    def __init__(self, sock: socket.socket, kinds: msgspec.msgpack.Decoder[Received]) -> None:
        sock.setblocking(True)
        self._kinds = kinds
        self._reader = sock.makefile("rb")
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; waits while the other side does not read, which holds this one back. Raises OSError."""
        data = frame(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> Received | None:
        """The next message, None once the other side is gone. Raises ChannelError."""
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
            return self._kinds.decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ChannelError(str(error)) from error


class EngineChannel(MessageChannel[Command]):
    """The engine's end: it receives commands and sends events."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _commands)


def _bounded(head: bytes) -> int:
    (size,) = _length.unpack(head)
    if size > MAX_MESSAGE_BYTES:
        raise ChannelError(f"a message of {size} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    return int(size)
