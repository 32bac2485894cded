"""Messages of control streams, read past the library where a frame is a whole one, are those that the library reads."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from gateway.joining.stream_protocol import GATHER_S, MOST_SMALL, MOST_UNSENT, MOST_WAITING, StreamProtocol

LIMIT = 4 * MOST_SMALL


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False
        self.reading = True
        self.waiting = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Stream:
    """An open one, from both ends; ``said`` are the frames that a client sent."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.over = asyncio.Event()
        self.held = asyncio.Event()
        self.held.set()
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            ws=StreamProtocol,
            ws_max_size=LIMIT,
            ws_per_message_deflate=False,
        )
        config.load()
        self.server = StreamProtocol(config, ServerState(), {})
        self.wire = Wire()
        self.server.connection_made(self.wire)
        self.client = ClientProtocol(parse_uri("ws://gateway/"))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (event := await receive())["type"] != "websocket.disconnect":
            self.received.append(event["bytes"])
            await self.held.wait()
        self.over.set()

    async def open(self) -> Stream:
        self.client.send_request(self.client.connect())
        self.server.data_received(b"".join(self.client.data_to_send()))
        await self.settled()
        self.client.receive_data(self.wire.written)
        return self

    def said(self) -> bytes:
        return b"".join(self.client.data_to_send())

    async def settled(self) -> None:
        for _ in range(200):
            await asyncio.sleep(0)


@pytest.mark.parametrize("step", [1, 2, 7, 1000, 1 << 20])
async def test_messages_of_all_sizes_arrive_whole_however_they_are_cut(step: int) -> None:
    stream = await Stream().open()
    sizes = [0, 1, 125, 126, 127, 65535, 3] if step < 7 else [0, 1, 125, 126, 65535, 65536, MOST_SMALL + 14, 5]
    messages = [os.urandom(size) for size in sizes]
    for message in messages:
        stream.client.send_binary(message)
    said = stream.said()
    for at in range(0, len(said), step):
        stream.server.data_received(said[at : at + step])
        if at % (64 * step) == 0:
            await asyncio.sleep(0)
    await stream.settled()
    assert stream.received == messages


async def test_messages_in_parts_with_pings_between_them_are_put_together() -> None:
    dice = random.Random(1)
    stream = await Stream().open()
    stream.client.send_binary(b"before")
    stream.client.send_binary(b"a", fin=False)
    stream.client.send_ping(b"?")
    stream.client.send_continuation(b"b", fin=False)
    stream.client.send_continuation(b"c", fin=True)
    stream.client.send_binary(b"after")
    said = stream.said()
    while said:
        cut = dice.randrange(1, 9)
        stream.server.data_received(said[:cut])
        said = said[cut:]
    await stream.settled()
    assert stream.received == [b"before", b"abc", b"after"]
    assert b"?" in stream.wire.written


async def test_a_message_within_another_that_is_not_whole_ends_the_stream() -> None:
    stream = await Stream().open()
    stream.client.send_binary(b"a", fin=False)
    stream.server.data_received(stream.said())
    stream.server.data_received(_frame(b"b"))
    await stream.settled()
    assert stream.received == []
    assert stream.wire.closing


@pytest.mark.parametrize("wrong", ["no mask", "reserved bit", "too large", "unknown kind"])
async def test_what_is_no_frame_of_a_client_ends_the_stream(wrong: str) -> None:
    stream = await Stream().open()
    stream.client.send_binary(b"well")
    good = stream.said()
    bad = {
        "no mask": b"\x82\x01a",
        "reserved bit": b"\xc2\x81\0\0\0\0a",
        "too large": b"\x82\xff" + (LIMIT + 1).to_bytes(8, "big") + bytes(4),
        "unknown kind": b"\x83\x81\0\0\0\0a",
    }[wrong]
    stream.server.data_received(good + bad)
    stream.server.data_received(_frame(b"never"))
    await stream.settled()
    assert stream.received == [b"well"]
    assert stream.wire.closing


async def test_what_follows_a_close_is_not_read() -> None:
    stream = await Stream().open()
    stream.client.send_close(1000)
    stream.server.data_received(stream.said() + _frame(b"late"))
    await asyncio.wait_for(stream.over.wait(), 5)
    assert stream.received == []


async def test_frames_that_came_before_the_stream_was_open_are_read_in_their_order() -> None:
    stream = Stream()
    stream.client.send_request(stream.client.connect())
    stream.server.data_received(b"".join(stream.client.data_to_send()))
    first = _frame(b"early")
    stream.server.data_received(first[:4])
    await stream.settled()
    stream.server.data_received(first[4:] + _frame(b"later"))
    await stream.settled()
    assert stream.received == [b"early", b"later"]


async def test_the_socket_is_left_alone_while_many_messages_wait_and_read_again_afterwards() -> None:
    stream = await Stream().open()
    stream.held.clear()
    for number in range(MOST_WAITING + 1):
        assert not stream.server.read_paused, number
        stream.server.data_received(_frame(b"x"))
        await asyncio.sleep(0)
    stream.server.data_received(_frame(b"x"))
    assert stream.server.read_paused
    await asyncio.sleep(2 * GATHER_S)
    assert not stream.wire.reading
    stream.held.set()
    await stream.settled()
    assert stream.wire.reading
    assert len(stream.received) == MOST_WAITING + 2


async def test_what_comes_quickly_is_gathered_for_a_moment_and_what_comes_seldom_is_not() -> None:
    stream = await Stream().open()
    for _ in range(3):
        await asyncio.sleep(2 * GATHER_S)
        stream.server.data_received(_frame(b"x"))
        assert stream.wire.reading
    stream.server.data_received(_frame(b"x"))
    assert not stream.wire.reading
    await stream.settled()
    assert len(stream.received) == 4
    async with asyncio.timeout(5):
        while not stream.wire.reading:  # noqa: ASYNC110 (a transport has no event)
            await asyncio.sleep(GATHER_S)


def _frame(data: bytes) -> bytes:
    return Frame(Opcode.BINARY, data).serialize(mask=True)


async def test_who_listens_hears_what_waits_and_each_message_as_it_is_read() -> None:
    stream = await Stream().open()
    stream.held.clear()
    for number in range(MOST_WAITING + 2):
        stream.server.data_received(_frame(b"%d" % number))
    await asyncio.sleep(2 * GATHER_S)
    assert not stream.wire.reading
    heard: list[bytes] = []
    stream.server.listen(heard.append)
    assert stream.wire.reading
    assert heard == [b"%d" % number for number in range(MOST_WAITING + 2)][len(stream.received) :]
    heard.clear()
    large = os.urandom(MOST_SMALL + 1)
    stream.client.send_binary(b"whole")
    stream.client.send_binary(b"in ", fin=False)
    stream.client.send_continuation(b"parts", fin=True)
    stream.client.send_binary(large)
    stream.server.data_received(stream.said())
    assert heard == [b"whole", b"in parts", large], "before anything else runs"
    assert not stream.over.is_set()
    stream.client.send_close(1000)
    stream.server.data_received(stream.said() + _frame(b"late"))
    stream.held.set()
    await asyncio.wait_for(stream.over.wait(), 5)
    assert heard[3:] == []


async def test_a_message_is_said_at_once_unless_it_has_to_wait() -> None:
    stream = await Stream().open()
    stream.client.events_received()
    stream.wire.written = b""
    assert stream.server.say(b"now")
    stream.client.receive_data(stream.wire.written)
    [frame] = stream.client.events_received()
    assert frame == Frame(Opcode.BINARY, b"now")
    stream.wire.waiting = MOST_UNSENT + 1
    assert not stream.server.say(b"later")
    stream.wire.waiting = 0
    stream.server.pause_writing()
    assert not stream.server.say(b"later")
    stream.server.resume_writing()
    stream.client.send_close(1000)
    stream.server.data_received(stream.said())
    assert not stream.server.say(b"never")
