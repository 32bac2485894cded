"""Load on whatever listens on a port, and what it cost the processes behind it, by the kernel's own accounts."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

AT_ONCE = 32
"""Short requests under way."""
_EVENT = b"data: {"


@dataclass(frozen=True, slots=True)
class Target:
    """What is loaded. ``pid`` is the process whose time is counted, with all its descendants; ``key`` "" for none."""

    port: int
    pid: int
    model: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. ``whole``: it ended as HTTP says it must, with all that was asked for. Times in seconds."""

    ok: bool
    whole: bool
    first_s: float
    chunks: int


@dataclass(frozen=True, slots=True)
class Seen:
    """All requests of a run, the gaps between reads of one stream, and processor and wall seconds."""

    answers: tuple[Answer, ...]
    gaps_s: tuple[float, ...]
    cpu_s: float
    wall_s: float

    @property
    def chunks(self) -> int:
        """Streamed."""
        return sum(one.chunks for one in self.answers)

    @property
    def lost(self) -> int:
        """Requests without a success."""
        return sum(not one.ok for one in self.answers)

    @property
    def truncated(self) -> int:
        """Streams that began and ended early."""
        return sum(one.ok and not one.whole for one in self.answers)

    def first_ms(self, share: float) -> float:
        """Of the times to the first byte the one that this share does not exceed."""
        return 1e3 * quantile([one.first_s for one in self.answers], share)

    def gap_ms(self, share: float) -> float:
        """Of the gaps likewise."""
        return 1e3 * quantile(self.gaps_s, share)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that a share of all values does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def streams(target: Target, count: int, tokens: int, patience_s: float, *, distinct: bool = False) -> Seen:
    """So many streams, all opened at once. ``distinct``: each of another prompt, which nobody has cached."""
    gaps: list[float] = []
    requests = _requests(target, count, 200, tokens, stream=True, distinct=distinct)
    began, cpu = time.perf_counter(), cpu_seconds(target.pid)
    answers = await asyncio.gather(*(_one(target, request, tokens, gaps, patience_s) for request in requests))
    return Seen(tuple(answers), tuple(gaps), cpu_seconds(target.pid) - cpu, time.perf_counter() - began)


async def requests(
    target: Target, count: int, words: int, patience_s: float, at_once: int = AT_ONCE, *, distinct: bool = False
) -> Seen:
    """So many whole answers of 5 tokens to prompts of ``words`` words, ``distinct`` as those of ``streams``."""
    slots = asyncio.Semaphore(at_once)
    made = _requests(target, count, words, 5, stream=False, distinct=distinct)

    async def one(request: bytes) -> Answer:
        async with slots:
            return await _one(target, request, 0, [], patience_s)

    began, cpu = time.perf_counter(), cpu_seconds(target.pid)
    answers = await asyncio.gather(*(one(request) for request in made))
    return Seen(tuple(answers), (), cpu_seconds(target.pid) - cpu, time.perf_counter() - began)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and its descendants have taken."""
    ticks = 0
    for one in _family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> set[int]:
    found = {pid}
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in thread.read_text().split():
                found |= _family(int(child))
        except FileNotFoundError:
            continue
    return found


def _requests(target: Target, count: int, words: int, tokens: int, *, stream: bool, distinct: bool) -> Sequence[bytes]:
    if not distinct:
        return [_request(target, "", words, tokens, stream)] * count
    begins = (f"{secrets.randbelow(10**8):08d} " for _ in range(count))
    return [_request(target, begin, words, tokens, stream) for begin in begins]


def _request(target: Target, begin: str, words: int, tokens: int, stream: bool) -> bytes:
    prompt = begin + "hello " * words
    body = json.dumps({"model": target.model, "prompt": prompt, "max_tokens": tokens, "stream": stream})
    auth = f"authorization: Bearer {target.key}\r\n" if target.key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{auth}"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


async def _one(target: Target, request: bytes, chunks: int, gaps: list[float], patience_s: float) -> Answer:
    loop = asyncio.get_running_loop()
    client = _Client(loop, gaps)
    try:
        async with asyncio.timeout(patience_s):
            transport, _ = await loop.create_connection(lambda: client, "127.0.0.1", target.port)
            client.began = time.perf_counter()
            transport.write(request)
            await client.over
    except (OSError, TimeoutError):
        pass
    finally:
        client.close()
    return Answer(client.ok, client.complete and client.chunks == chunks, client.first_s, client.chunks)


class _Client(asyncio.Protocol):
    """One answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gaps: list[float]) -> None:
        self.over: asyncio.Future[None] = loop.create_future()
        self.began = 0.0
        self.first_s = 0.0
        self.chunks = 0
        self.ok = False
        self.complete = False
        self._gaps = gaps
        self._last = 0.0
        self._head = b""
        self._left: int | None = None
        self._in_body = False
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._last:
            self._gaps.append(now - self._last)
        else:
            self.first_s = now - self.began
        self._last = now
        if not self._in_body:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._in_body, self.ok = True, head.startswith(b"HTTP/1.1 200")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    self._left = int(line.partition(b":")[2])
        seen = self._tail + data
        self.chunks += seen.count(_EVENT)
        self._tail = seen[1 - len(_EVENT) :]
        if self._left is not None:
            self._left -= len(data)
            self.complete = self._left <= 0
        else:
            self.complete = seen.endswith(b"0\r\n\r\n")
        if self.complete and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def close(self) -> None:
        """Let go of the connection."""
        if self._transport is not None:
            self._transport.abort()
