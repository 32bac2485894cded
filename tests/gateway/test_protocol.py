"""All of a request but its body is bounded in size and in time, whoever sends it."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway import protocol
from tests.gateway.conftest import Open, Stage


async def send(one: Stage, data: bytes) -> bytes:
    """What comes back until the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]))
    writer.write(data)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


async def test_a_head_without_end_is_cut_off(stage: Open) -> None:
    one = await stage()
    endless = b"GET /live HTTP/1.1\r\n" + b"x-filler: " + b"a" * (2 << 20)
    try:
        answer = await send(one, endless)
    except ConnectionResetError:
        return
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("start", [b"", b"GET /live HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_does_not_come_closes_the_connection(
    stage: Open, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)
    one = await stage()
    assert await send(one, start) == b""


async def test_a_body_that_takes_longer_than_a_head_may_is_not_cut_off(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    one = await stage()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]))
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n"
    for part in (head, b"\r\n", b'{"prompt"', b': "a"}'):
        writer.write(part)
        await asyncio.sleep(0.15)
    status = await reader.readline()
    writer.close()
    assert status == b"HTTP/1.1 200 OK\r\n"


CHUNKED = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
NEVER_ENDING = {
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"x: y\r\n" * 1000),
    "one trailer": (CHUNKED + b"0\r\nx: ", b"y" * 6000),
    "a chunk's extension": (CHUNKED + b"1;", b"a=b;" * 1500),
    "blank lines": (b"", b"\r\n" * 3000),
}


async def sent_until_cut(data: bytes, again: bytes, one: Stage, limit: int) -> int:
    """Bytes that the gateway took before it closed; ``limit`` where it never did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]))
    reading = asyncio.create_task(reader.read())
    writer.write(data)
    sent = 0
    try:
        while sent < limit and not reading.done():
            writer.write(again)
            sent += len(again)
            await writer.drain()
            await asyncio.sleep(0)
    except ConnectionError:
        return sent
    finally:
        writer.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return sent


@pytest.mark.parametrize("name", NEVER_ENDING)
async def test_what_is_neither_head_nor_body_is_bounded_too(stage: Open, name: str) -> None:
    one = await stage()
    start, again = NEVER_ENDING[name]
    assert await sent_until_cut(start, again, one, 32 << 20) < 16 << 20


async def test_trailers_within_the_bound_are_ignored(stage: Open) -> None:
    one = await stage()
    body = b'e\r\n{"prompt":"a"}\r\n0\r\n' + b"x: y\r\n" * 100 + b"\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await send(one, head + body)).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_goes_on_after_its_refusal_is_cut_off(stage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.3)
    one = await stage()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 413 Request Entity Too Large\r\n"

    async def go_on() -> None:
        while not reader.at_eof():
            writer.write(b"a")
            await asyncio.sleep(0.05)

    try:
        async with asyncio.timeout(3):
            _, rest = await asyncio.gather(go_on(), reader.read())
        assert b"body_too_large" in rest
    finally:
        writer.close()


async def test_a_connection_is_kept_where_the_rest_of_a_refused_body_comes(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.3)
    one = await stage(max_body_bytes=10)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n\r\n")
    assert b" 413 " in await reader.readline()
    writer.write(b"a" * 20)
    await asyncio.sleep(0.6)
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b'{"status":"live"}')
    writer.close()


@pytest.mark.parametrize("data", [b"\0garbage\r\n\r\n", b"FOO /live HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_what_is_no_http_is_refused_like_anything_else(stage: Open, data: bytes) -> None:
    head, _, body = (await send(await stage(), data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
