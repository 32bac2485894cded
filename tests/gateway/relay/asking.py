"""Requests to a gateway: by a client that knows HTTP, or byte for byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.gateway.conftest import Stage

PATH = "/v1/completions"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
ANSWER = json.dumps({"id": "cmpl", "choices": [{"index": 0, "text": " hi"}], "usage": USAGE}).encode()


async def ask(one: Stage, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await one.client.post(PATH, json={"model": "m", "prompt": "a", "max_tokens": 4} | body, headers=headers)


async def raw(one: Stage, data: bytes, until: bytes = b"", timeout_s: float = 5.0) -> bytes:
    """What comes back up to ``until``, or until the gateway closes."""
    reader, writer = await connect(one)
    writer.write(data)
    seen = b""
    try:
        async with asyncio.timeout(timeout_s):
            while not (until and until in seen):
                part = await reader.read(1 << 16)
                if not part:
                    break
                seen += part
    finally:
        writer.close()
    return seen


async def connect(one: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]))


def request(body: dict[str, Any] | None = None, more: str = "", path: str = PATH) -> bytes:
    data = json.dumps({"model": "m", "prompt": "a"} | (body or {})).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{more}content-length: {len(data)}\r\n\r\n".encode() + data


async def idle(one: Stage) -> None:
    """Nothing is under way, and nothing is counted as if it were."""
    await one.until(lambda: one.gateway.generation.in_flight.count == 0)
    assert all(engine.running == 0 for engine in one.gateway.fleet.engines)
