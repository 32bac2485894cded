"""What the benchmark counts: whole streams, cut ones, lost ones, and the processor time of what it loads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.bench.relay import load, process
from node.bench.relay.load import Target
from node.bench.relay.measure import Setting, loaded

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"b\r\ndata: {} \n\n\r\n"


async def test_an_engine_that_computes_nothing_streams_what_was_asked_for(tmp_path: Path) -> None:
    async with process.engine(tmp_path, 200.0) as port:
        target = Target(port, os.getpid(), process.MODEL)
        figures = await loaded(target, Setting(streams=5, chunks=20, rate=200.0, requests=10, words=5), lambda _: None)
    assert (figures.lost_streams, figures.truncated_streams, figures.lost_requests) == (0, 0, 0)
    assert figures.chunks == 100
    assert figures.interchunk_p50_ms == pytest.approx(5, abs=4)
    assert set(figures.plain()) >= {"cpu_us_per_chunk", "cpu_us_per_request", "interchunk_p99_ms", "ttfb_p99_ms"}


async def scripted(answer: bytes, run: Callable[[Target], asyncio.Future[load.Seen]]) -> load.Seen:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        return await run(Target(server.sockets[0].getsockname()[1], os.getpid(), "m"))


@pytest.mark.parametrize(
    ("answer", "lost", "truncated", "chunks"),
    [
        (STREAM + 3 * CHUNK + b"0\r\n\r\n", 0, 0, 3),
        (STREAM + 2 * CHUNK + b"0\r\n\r\n", 0, 1, 2),
        (STREAM + 3 * CHUNK, 0, 1, 3),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", 1, 0, 0),
        (b"", 1, 0, 0),
    ],
)
async def test_a_stream_counts_as_whole_only_with_all_its_chunks_and_its_end(
    answer: bytes, lost: int, truncated: int, chunks: int
) -> None:
    seen = await scripted(answer, lambda target: asyncio.ensure_future(load.streams(target, 1, 3, 5.0)))
    assert (seen.lost, seen.truncated, seen.chunks) == (lost, truncated, chunks)


async def test_processor_time_is_that_of_a_process_and_its_children(tmp_path: Path) -> None:
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    child = await asyncio.create_subprocess_exec("python3", "-c", busy, start_new_session=True)
    try:
        give_up = time.monotonic() + 10
        while load.cpu_seconds(child.pid) < 0.2:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.02)
    finally:
        os.killpg(child.pid, 9)
        await child.wait()


def test_a_quantile_is_a_value_that_was_seen() -> None:
    assert load.quantile([], 0.99) == 0.0
    assert load.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert load.quantile([float(n) for n in range(100)], 0.99) == 99.0
