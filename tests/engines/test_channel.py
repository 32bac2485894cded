"""Frames between node and engine: bounded, typed, and a broken one ends the channel."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import pytest

from engines.channel import MAX_MESSAGE_BYTES, ChannelError, EngineChannel, frame, read_event
from engines.protocol import CancelCommand, Pulse, Token
from kvcache.control import TokenLogprob


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, EngineChannel]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    yield ours, EngineChannel(theirs)
    ours.close()
    theirs.close()


def test_commands_arrive_one_by_one_and_the_end_is_seen(pair: tuple[socket.socket, EngineChannel]) -> None:
    ours, channel = pair
    ours.sendall(frame(CancelCommand("a")) + frame(CancelCommand("b")))
    assert [channel.receive(), channel.receive()] == [CancelCommand("a"), CancelCommand("b")]
    ours.close()
    assert channel.receive() is None


def test_half_a_command_is_no_command(pair: tuple[socket.socket, EngineChannel]) -> None:
    ours, channel = pair
    ours.sendall(frame(CancelCommand("a"))[:-1])
    ours.close()
    assert channel.receive() is None


@pytest.mark.parametrize("data", [struct.pack(">I", MAX_MESSAGE_BYTES + 1), b"\0\0\0\1\xc1", frame(Pulse(0, 0))])
def test_what_is_no_command_is_refused(pair: tuple[socket.socket, EngineChannel], data: bytes) -> None:
    ours, channel = pair
    ours.sendall(data)
    with pytest.raises(ChannelError):
        channel.receive()


@pytest.mark.parametrize("data", [struct.pack(">I", MAX_MESSAGE_BYTES + 1), b"\0\0\0\1\xc1", frame(CancelCommand("a"))])
async def test_what_is_no_event_is_refused(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    with pytest.raises(ChannelError):
        await read_event(reader)


async def test_events_arrive_with_their_size(pair: tuple[socket.socket, EngineChannel]) -> None:
    ours, channel = pair
    token = Token("job", 7, (TokenLogprob(7, -0.5),))
    channel.send(token)
    data = ours.recv(4096)
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    assert await read_event(reader) == (token, len(data) - 4)
    assert await read_event(reader) is None


def test_a_message_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="above the limit"):
        frame(CancelCommand("x" * MAX_MESSAGE_BYTES))
