"""An engine that computes nothing: ``python -m node.bench.relay.engine PORT RATE``.

It answers /v1/completions with as many chunks as ``max_tokens`` says, RATE a second and stream (0: as fast as they are
taken), or whole. One clock ticks for all streams, so that a thousand of them cost it little.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

MODEL = "mock"
_EVENT = {
    "id": "cmpl-0",
    "object": "text_completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_WORD = _chunk(b"data: " + json.dumps(_EVENT).encode() + b"\n\n")
_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_SLICES = 10
"""Streams speak spread over a period, as those of an engine do that batches, not all in one moment."""


class Clock:
    """Makes all streams speak, each once a period."""

    def __init__(self, rate: float) -> None:
        self._period_s = 1 / rate
        self._slices: list[set[Speaker]] = [set() for _ in range(_SLICES)]
        self._added = 0

    def add(self, speaker: Speaker) -> None:
        """It speaks from now on."""
        self._added += 1
        self._slices[self._added % _SLICES].add(speaker)

    async def run(self) -> None:
        """Tick for ever."""
        loop = asyncio.get_running_loop()
        due, at = loop.time(), 0
        while True:
            due += self._period_s / _SLICES
            await asyncio.sleep(max(0.0, due - loop.time()))
            speakers = self._slices[at % _SLICES]
            speakers -= {speaker for speaker in tuple(speakers) if not speaker.speak()}
            at += 1


class Speaker(asyncio.Protocol):
    """One connection."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._buffer = b""
        self._left = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) >= length:
            self._buffer = rest[length:]
            self._answer(head.split(b" ", 2)[1], rest[:length])

    def _answer(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/completions":
            self._whole({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        asked = json.loads(body)
        tokens = asked.get("max_tokens", 16)
        if not asked.get("stream"):
            choice = {"index": 0, "text": " word" * tokens, "logprobs": None, "finish_reason": "length"}
            usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
            self._whole(_EVENT | {"choices": [choice], "usage": usage})
            return
        self._transport.write(_STREAM)
        self._left = tokens
        if self._clock is None:
            self._transport.write(_WORD * tokens + _END)
        else:
            self._clock.add(self)

    def speak(self) -> bool:
        """Say the next word; False after the last."""
        if self._left <= 0:
            return False
        self._left -= 1
        self._transport.write(_WORD if self._left else _WORD + _END)
        return self._left > 0

    def _whole(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


async def serve(port: int, rate: float) -> None:
    """Until cancelled; says ``listening PORT`` once it is."""
    clock = Clock(rate) if rate else None
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Speaker(clock), "127.0.0.1", port, backlog=4096)
    print(f"listening {server.sockets[0].getsockname()[1]}", flush=True)
    if clock is not None:
        await clock.run()
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2])))
