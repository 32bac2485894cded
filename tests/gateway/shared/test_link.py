"""The way to Redis, where the client library is at odds with asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.shared.link import RedisLink
from gateway.shared.settings import parse_redis


async def test_whoever_is_cancelled_ends_though_the_client_makes_an_error_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(*_: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("reset") from None

    monkeypatch.setattr(Redis, "execute_command", breaks)
    task = asyncio.create_task(RedisLink(parse_redis("redis://127.0.0.1:1/0")).command("PING"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
