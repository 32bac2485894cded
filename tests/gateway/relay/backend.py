"""An OpenAI-like engine that says what a test wants, byte for byte; asked for its health, it is well."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.gateway.upstream.scripted import read_request, scripted

Say = Callable[["Backend", asyncio.StreamReader, asyncio.StreamWriter, bytes, bytes], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body


class Backend:
    """``seen`` are heads and bodies of generation requests; ``gone`` is set when a client's connection ends early."""

    def __init__(self, say: Say) -> None:
        self.seen: list[tuple[bytes, bytes]] = []
        self.gone = asyncio.Event()
        self.url = ""
        self._say = say

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            if head.startswith(b"GET /health"):
                writer.write(whole(b"{}"))
            elif head.startswith(b"GET /v1/models"):
                writer.write(whole(b'{"object": "list", "data": [{"id": "m"}]}'))
            else:
                self.seen.append((head, body))
                await self._say(self, reader, writer, head, body)


def says(*parts: bytes, then_close: bool = False) -> Say:
    """These bytes to every request."""

    async def say(
        backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes
    ) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.005)
        if then_close:
            raise ConnectionResetError

    return say


@asynccontextmanager
async def backend(say: Say) -> AsyncIterator[Backend]:
    one = Backend(say)
    async with scripted(one.talk) as url:
        one.url = url
        yield one


def engines_file(directory: Path, *backends: Backend, **fields: object) -> Path:
    lines = []
    for number, one in enumerate(backends):
        lines += ["[[engine]]", f'url = "{one.url}"', 'model = "m"', f'name = "e{number}"']
        lines += [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    file = directory / "engines.toml"
    file.write_text("\n".join(lines))
    return file
