"""The head of a request is bounded in size and in time, whoever sends it."""

from __future__ import annotations

import asyncio

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
