"""The process around the engine: how it starts, how it dies, and that every way of dying is noticed and named."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

import engines.stream
from engines.process import EngineProcess
from engines.protocol import (
    EngineLost,
    Exported,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobFailed,
    Loading,
    PrefillCommand,
    PrefillFinished,
    Token,
)
from engines.spec import EngineSpec
from engines.stream import ProcessStream
from kvcache.control import Sampling
from kvcache.layout import DType
from tests.engines.harness import GREEDY, Room, generate, layout_of, prefill, prompt, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = Sampling(max_tokens=8000, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def room(model_dir: Callable[[str], Path]) -> Room:
    return Room.create(layout_of(model_dir("llama")), pages=1200)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Callable[[str], Path], room: Room) -> AsyncIterator[EngineProcess]:
    async with running(model_dir("llama"), room, max_queue=8, max_running=8, self_check=False) as started:
        yield started


async def mortal(model_dir: Callable[[str], Path], room: Room) -> EngineProcess:
    """An engine for a test that kills it."""
    spec = EngineSpec(model_dir("llama"), DType.FLOAT32, self_check=False)
    return await EngineProcess.start(spec, room.pool)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_loading_is_reported_stage_by_stage(model_dir: Callable[[str], Path], room: Room) -> None:
    seen: list[Loading] = []
    engine = await EngineProcess.start(EngineSpec(model_dir("llama"), DType.FLOAT32), room.pool, seen.append)
    await engine.close()
    assert [loading.stage for loading in seen] == ["import", "weights", "self-check"]
    assert [loading.fraction for loading in seen] == sorted(loading.fraction for loading in seen)
    assert not alive(engine.pid)


async def test_jamba_is_refused_by_name_and_at_once(tmp_path: Path, room: Room) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "jamba"}))
    started = time.monotonic()
    with pytest.raises(
        EngineLost, match=r"'jamba' is not supported .*restarts at every chunk.* gemma3_text, gemma3, llama, "
    ):
        await EngineProcess.start(EngineSpec(tmp_path, DType.FLOAT32), room.pool)
    assert time.monotonic() - started < 5, "before torch is loaded"


@pytest.mark.parametrize(
    ("options", "names"),
    [({"dtype": DType.FLOAT16}, "dtype float16"), ({"context_tokens": 9000}, "context_tokens 9000 is above")],
)
async def test_what_the_model_cannot_do_is_refused_by_field(
    model_dir: Callable[[str], Path], room: Room, options: dict[str, object], names: str
) -> None:
    spec = EngineSpec(**{"model_dir": model_dir("llama"), "dtype": DType.FLOAT32} | options)  # type: ignore[arg-type]
    with pytest.raises(EngineLost, match=names):
        await EngineProcess.start(spec, room.pool)


async def test_a_missing_model_is_named(tmp_path: Path, room: Room) -> None:
    with pytest.raises(EngineLost, match=r"config\.json"):
        await EngineProcess.start(EngineSpec(tmp_path / "nowhere", DType.FLOAT32), room.pool)


async def test_a_start_that_takes_too_long_leaves_no_process(model_dir: Callable[[str], Path], room: Room) -> None:
    before = children()
    with pytest.raises(EngineLost, match="not ready after"):
        await EngineProcess.start(EngineSpec(model_dir("llama"), DType.FLOAT32), room.pool, timeout_s=0.3)
    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


async def test_closing_a_stream_cancels_its_job_and_returns_when_the_engine_is_done(
    engine: EngineProcess, room: Room
) -> None:
    async with aclosing(engine.submit(GenerateCommand("endless", prompt(40), 0, (), ENDLESS))) as stream:
        assert isinstance(await anext(stream), Token)
    table = room.table("long", 8000)
    stream = engine.submit(PrefillCommand("long", prompt(8001), 0, 8000, table.pages))
    await anext(stream)
    await asyncio.wait_for(stream.aclose(), 3)
    before = room.pieces(table, room.plan(8000))
    assert (await generate(engine, "after", prompt(40), GREEDY)).reason == "length"
    assert room.pieces(table, room.plan(8000)) == before
    room.owners.release("long")


async def test_a_stream_that_nobody_read_from_is_cancelled_too(engine: EngineProcess) -> None:
    stream = engine.submit(GenerateCommand("unread", prompt(40), 0, (), ENDLESS))
    await stream.aclose()
    assert (await generate(engine, "unread", prompt(40), GREEDY)).reason == "length"


async def test_a_cancelled_job_says_so_and_an_unknown_one_is_ignored(engine: EngineProcess) -> None:
    await engine.cancel("never heard of")
    stream = engine.submit(GenerateCommand("endless", prompt(40), 0, (), ENDLESS))
    await anext(stream)
    await engine.cancel("endless")
    assert [event async for event in stream][-1] == JobCancelled("endless", 0)


async def test_a_name_that_still_runs_is_refused(engine: EngineProcess) -> None:
    async with aclosing(engine.submit(GenerateCommand("twice", prompt(40), 0, (), ENDLESS))):
        with pytest.raises(ValueError, match="'twice' is still running"):
            engine.submit(GenerateCommand("twice", prompt(40), 0, (), GREEDY))


async def test_jobs_beyond_the_bound_fail_at_once(engine: EngineProcess) -> None:
    streams = [engine.submit(GenerateCommand(f"g{n}", prompt(4), 0, (), ENDLESS)) for n in range(17)]
    last = [event async for event in streams[16]]
    assert last == [JobFailed("g16", "queue_full", "the engine holds 16 jobs")]
    await asyncio.gather(*(stream.aclose() for stream in streams))


async def test_a_bad_job_fails_and_the_engine_goes_on(engine: EngineProcess) -> None:
    bad = [event async for event in engine.submit(PrefillCommand("bad", prompt(50), 0, 49, (0,)))]
    assert [type(event) for event in bad] == [JobFailed]
    assert (await generate(engine, "good", prompt(20), GREEDY)).reason == "length"


async def test_prefills_and_generations_of_many_clients_all_end(engine: EngineProcess, room: Room) -> None:
    async def client(n: int) -> str:
        table = room.table(f"c{n}", 300 + n)
        ids = prompt(301 + n, seed=n)
        await prefill(engine, f"p{n}", ids, table)
        spoken = await generate(engine, f"c{n}", ids, GREEDY, table)
        room.owners.release(f"c{n}")
        return spoken.reason

    assert await asyncio.gather(*(client(n) for n in range(6))) == ["length"] * 6
    room.owners.check_integrity()


async def test_a_killed_engine_is_lost_at_once_for_every_stream(model_dir: Callable[[str], Path], room: Room) -> None:
    engine = await mortal(model_dir, room)
    streams = [engine.submit(GenerateCommand(f"g{n}", prompt(40), 0, (), ENDLESS)) for n in range(3)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    os.kill(engine.pid, signal.SIGKILL)
    cause = await asyncio.wait_for(engine.wait_lost(), 2)
    assert "SIGKILL" in cause
    for stream in streams:
        with pytest.raises(EngineLost, match="SIGKILL"):
            [event async for event in stream]
        await stream.aclose()
    with pytest.raises(EngineLost):
        await anext(engine.submit(GenerateCommand("late", prompt(4), 0, (), GREEDY)))
    await engine.close()


async def test_a_stopped_engine_is_killed_within_five_seconds(model_dir: Callable[[str], Path], room: Room) -> None:
    engine = await mortal(model_dir, room)
    stream = engine.submit(GenerateCommand("g", prompt(40), 0, (), ENDLESS))
    await anext(stream)
    os.kill(engine.pid, signal.SIGSTOP)
    assert "silent for 4 s" in await asyncio.wait_for(engine.wait_lost(), 5)
    assert not alive(engine.pid)
    with pytest.raises(EngineLost, match="silent"):
        [event async for event in stream]
    await engine.close()


async def test_a_crash_is_told_with_its_signal_and_a_refusal_with_its_reason(
    model_dir: Callable[[str], Path], room: Room, tmp_path: Path
) -> None:
    engine = await mortal(model_dir, room)
    os.kill(engine.pid, signal.SIGSEGV)
    assert "SIGSEGV" in await asyncio.wait_for(engine.wait_lost(), 3)
    await engine.close()
    (tmp_path / "config.json").write_text((model_dir("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineLost, match=r"exit status 2\): cannot serve [^|]*(?i:safetensor|header)[^|]*$"):
        await EngineProcess.start(EngineSpec(tmp_path, DType.FLOAT32), room.pool)


async def test_a_model_that_breaks_in_an_unforeseen_way_is_refused_in_one_line(tmp_path: Path, room: Room) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineLost, match=r"exit status 2\): cannot serve [^|\n]+$"):
        await EngineProcess.start(EngineSpec(tmp_path, DType.FLOAT32), room.pool)


async def test_a_closed_engine_ends_its_streams_and_closing_twice_is_harmless(
    model_dir: Callable[[str], Path], room: Room
) -> None:
    engine = await mortal(model_dir, room)
    stream = engine.submit(GenerateCommand("g", prompt(40), 0, (), ENDLESS))
    await asyncio.gather(engine.close(), engine.close())
    assert not alive(engine.pid)
    with pytest.raises(EngineLost, match=r"closed \(exit status 0\)"):
        [event async for event in stream]


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_engine_dies_with_its_node_even_when_stopped(model_dir: Callable[[str], Path], stopped: bool) -> None:
    script = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from engines.process import EngineProcess
        from engines.spec import EngineSpec
        from kvcache.hostpool import HostPool
        from kvcache.layout import DType

        async def main():
            spec = EngineSpec(Path(sys.argv[1]), DType.FLOAT32, self_check=False)
            engine = await EngineProcess.start(spec, HostPool.create(4096 * 16, 10))
            print(engine.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(model_dir("llama"))), stdout=subprocess.PIPE
    )
    assert node.stdout is not None
    pid = int(await asyncio.wait_for(node.stdout.readline(), 60))
    assert alive(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    node.kill()
    await node.wait()
    for _ in range(20):
        if not alive(pid):
            break
        await asyncio.sleep(0.1)
    assert not alive(pid)


async def test_a_reader_that_falls_behind_loses_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.stream, "BACKLOG_BYTES", 1000)
    cancelled: list[str] = []
    stream = ProcessStream("slow", cancelled.append)
    for n in range(20):
        stream.deliver(Token("slow", n), 100)
    assert cancelled == ["slow"]
    stream.deliver(JobCancelled("slow"), 20)
    assert [event async for event in stream] == [JobFailed("slow", "slow_reader", "its reader fell 1000 bytes behind")]


async def test_progress_that_was_not_read_yet_is_replaced_by_later_progress() -> None:
    stream = ProcessStream("p", lambda job: None)
    for n in range(1, 50):
        stream.deliver(Exported("p", n), 20)
    stream.deliver(PrefillFinished("p", 1.0), 20)
    assert [event async for event in stream] == [Exported("p", 49), PrefillFinished("p", 1.0)]


async def test_a_finished_stream_stays_finished(engine: EngineProcess) -> None:
    stream = engine.submit(GenerateCommand("short", prompt(3), 0, (), GREEDY))
    assert isinstance([event async for event in stream][-1], GenerationFinished)
    assert [event async for event in stream] == []
    await stream.aclose()
