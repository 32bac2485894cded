"""A vLLM server as its node's engine: jobs, offers, cancels, and every way in which its processes can be lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines.protocol import (
    Checkpoint,
    EngineLost,
    Exported,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    Loaded,
    Offered,
    PrefillCommand,
    PrefillFinished,
    Spoken,
    StoreCommand,
    Stored,
    Token,
)
from engines.vllm.engine import VllmEngine
from engines.vllm.process import session
from engines.vllm.spec import VllmSpec
from kvcache.control import Sampling, TokenLogprob
from kvcache.layout import DType
from tests.engines.harness import Room
from tests.engines.vllm.fake_vllm import hybrid_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[3]
CHUNK = 64
GREEDY = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=1500, temperature=0.0, ignore_eos=True)


def stand_in(directory: Path, mode: str) -> Path:
    """An executable that takes vLLM's Python's place: it drops ``-m engines.vllm.launch PID`` and starts the fake."""
    script = directory / f"python-{mode}"
    fake = f"PYTHONPATH={ROOT} exec {sys.executable} -m tests.engines.vllm.fake_server {mode}"
    start = {"mute": "exec sleep 60 #", "dies": "echo ValueError: this model is too large; exit 3"}.get(mode, fake)
    script.write_text(f'#!/bin/sh\nshift 3\n{start} "$@"\n')
    script.chmod(0o755)
    return script


def spec(directory: Path, mode: str = "good", **changes: Any) -> VllmSpec:
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3_text", "vocab_size": 90}))
    settings: dict[str, Any] = {"chunk_tokens": CHUNK, "max_queue": 4, "max_running": 4, "start_s": 20.0} | changes
    return VllmSpec(directory, hybrid_layout(), DType.BFLOAT16, python=stand_in(directory, mode), **settings)


@pytest.fixture(scope="module")
def room() -> Room:
    return Room.create(hybrid_layout(), pages=1500)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory, room: Room) -> AsyncIterator[VllmEngine]:
    started = await VllmEngine.start(spec(tmp_path_factory.mktemp("vllm")), room.pool)
    yield started
    await started.close()


def prompt(length: int) -> tuple[int, ...]:
    return tuple((at * 17 + length) % 89 for at in range(length))


async def read(stream: Any) -> list[JobEvent]:
    return [event async for event in stream]


async def test_what_it_can_is_measured_at_the_start(engine: VllmEngine) -> None:
    assert engine.info.architecture == "gemma3_text"
    assert engine.info.context_tokens == 2048
    assert engine.info.prefill_tokens_per_s > 0
    assert engine.info.decode_tokens_per_s > 0


async def test_a_prompt_is_prefilled_into_pages_and_spoken_after_from_them(engine: VllmEngine, room: Room) -> None:
    ids, table = prompt(200), room.table("a", 199)
    events = await read(engine.submit(PrefillCommand("p", ids, 0, 199, table.pages)))
    pieces = len(room.plan(199, chunk_tokens=CHUNK).pieces)
    assert isinstance(events[-1], PrefillFinished)
    assert events[-1].compute_s > 0
    assert events[-2] == Exported("p", pieces)
    spoken = await read(engine.submit(GenerateCommand("g", ids, 199, table.pages, GREEDY)))
    assert spoken[0] == Loaded("g")
    assert spoken[1:] == [*(Token("g", 101 + n) for n in range(4)), GenerationFinished("g", "length")]
    room.owners.release("a")


async def test_an_end_token_is_not_said_and_logprobs_are_ours(engine: VllmEngine) -> None:
    sampling = Sampling(max_tokens=9, temperature=0.0, stop_token_ids=(103,), logprobs=0)
    events = await read(engine.submit(GenerateCommand("e", prompt(20), 0, (), sampling)))
    said = [event for event in events if isinstance(event, Token)]
    assert [token.token_id for token in said] == [101, 102]
    assert said[0].logprobs == (TokenLogprob(101, -1.0),)
    assert events[-1] == GenerationFinished("e", "stop")


async def test_what_is_offered_is_stored_before_the_job_ends(engine: VllmEngine, room: Room) -> None:
    ids, table = prompt(200), room.table("a", 199)
    stream = engine.submit(PrefillCommand("p", ids, 0, 199, table.pages, checkpoints=(Checkpoint(128, 128),)))
    snapshot = room.table("s", 128, start=128)
    seen: list[JobEvent] = []
    async for event in stream:
        seen.append(event)
        if isinstance(event, Offered):
            engine.store(StoreCommand("p", event.stop, snapshot.pages))
    assert [event for event in seen if isinstance(event, Offered | Stored)] == [
        Offered("p", 128, 128, True),
        Stored("p", 128, True),
    ]
    assert isinstance(seen[-1], PrefillFinished)
    room.owners.release("a")
    room.owners.release("s")


async def test_an_answers_blocks_are_offered_after_it_was_said(engine: VllmEngine) -> None:
    sampling = Sampling(max_tokens=80, temperature=0.0, ignore_eos=True)
    stream = engine.submit(GenerateCommand("k", prompt(100), 0, (), sampling, keep_from=64))
    seen: list[JobEvent] = []
    async for event in stream:
        seen.append(event)
        if isinstance(event, Offered):
            engine.store(StoreCommand("k", event.stop, ()))
    rest = [event for event in seen if not isinstance(event, Token)]
    assert rest[-1] == GenerationFinished("k", "length")
    assert set(rest[:-1]) == {Spoken("k", "length"), Offered("k", 64, 128, True), Stored("k", 128, False)}


async def test_a_generation_that_has_said_enough_ends_as_by_an_end_token(engine: VllmEngine) -> None:
    stream = engine.submit(GenerateCommand("f", prompt(70), 0, (), LONG, keep_from=64))
    seen: list[JobEvent] = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 70:
            engine.finish("f")
        if isinstance(event, Offered):
            engine.store(StoreCommand("f", event.stop, ()))
    assert seen[-1] == GenerationFinished("f", "stop")
    (offered,) = [event for event in seen if isinstance(event, Offered)]
    assert (offered.start, offered.snapshot) == (64, True)
    assert 128 <= offered.stop <= 70 + len(seen)


@pytest.mark.parametrize("kind", ["prefill", "generate"])
async def test_a_cancel_ends_a_job_soon_and_leaves_its_pages_alone(engine: VllmEngine, room: Room, kind: str) -> None:
    ids, table = prompt(1500), room.table("a", 1499)
    if kind == "prefill":
        stream = engine.submit(PrefillCommand("c", ids, 0, 1499, table.pages))
    else:
        stream = engine.submit(GenerateCommand("c", ids[:300], 0, (), LONG))
    assert await anext(stream)
    await engine.cancel("c")
    began = time.monotonic()
    rest = await read(stream)
    assert isinstance(rest[-1], JobCancelled)
    assert time.monotonic() - began < 2
    before = room.pieces(table, room.plan(1499, chunk_tokens=CHUNK))
    await asyncio.sleep(0.2)
    assert room.pieces(table, room.plan(1499, chunk_tokens=CHUNK)) == before
    room.owners.release("a")


async def test_what_vllm_refuses_is_said_as_it_says_it(engine: VllmEngine) -> None:
    sampling = Sampling(max_tokens=2, top_p=1.5)
    assert await read(engine.submit(GenerateCommand("r", prompt(20), 0, (), sampling))) == [
        JobFailed("r", "sampling", "top_p must be at most 1")
    ]


async def test_pages_that_cannot_be_are_refused_before_vllm_hears_of_them(engine: VllmEngine) -> None:
    (failed,) = await read(engine.submit(PrefillCommand("b", prompt(50), 0, 49, (1, 2))))
    assert isinstance(failed, JobFailed)
    assert "takes" in failed.detail


async def test_no_more_jobs_are_taken_than_it_holds(engine: VllmEngine) -> None:
    streams = [engine.submit(GenerateCommand(f"q{n}", prompt(30), 0, (), LONG)) for n in range(8)]
    (failed,) = await read(engine.submit(GenerateCommand("more", prompt(30), 0, (), LONG)))
    assert failed == JobFailed("more", "queue_full", "the engine holds 8 jobs")
    for stream in streams:
        await stream.aclose()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("refuses", "packs its KV cache as 'amx'"),
        ("dies", r"ended with status 3\): ValueError: this model is too large"),
    ],
)
async def test_a_server_that_does_not_start_says_why(tmp_path: Path, room: Room, mode: str, said: str) -> None:
    with pytest.raises(EngineLost, match=said):
        await VllmEngine.start(spec(tmp_path, mode), room.pool)


async def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path, room: Room) -> None:
    with pytest.raises(EngineLost, match="not ready after 1 s"):
        await VllmEngine.start(spec(tmp_path, "mute", start_s=0.6), room.pool)


async def test_a_python_that_is_none_is_named(tmp_path: Path, room: Room) -> None:
    wrong = spec(tmp_path)
    wrong.python.unlink()
    with pytest.raises(EngineLost, match="is --engine-python the Python of its venv"):
        await VllmEngine.start(wrong, room.pool)


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 12.0)])
async def test_a_server_that_dies_or_stops_is_noticed_and_leaves_nothing(
    tmp_path: Path, room: Room, number: signal.Signals, within_s: float
) -> None:
    engine = await VllmEngine.start(spec(tmp_path), room.pool)
    stream = engine.submit(GenerateCommand("g", prompt(30), 0, (), LONG))
    assert await anext(stream)
    os.kill(engine.pid, number)
    began = time.monotonic()
    cause = await engine.wait_lost()
    assert time.monotonic() - began < within_s
    assert ("status -9" if number is signal.SIGKILL else "vLLM's ") in cause
    with pytest.raises(EngineLost):
        await read(stream)
    assert list(session(engine.pid)) == []
    await engine.close()


async def test_closing_ends_all_jobs_and_processes(tmp_path: Path, room: Room) -> None:
    engine = await VllmEngine.start(spec(tmp_path), room.pool)
    stream = engine.submit(GenerateCommand("g", prompt(30), 0, (), LONG))
    assert await anext(stream)
    await asyncio.gather(engine.close(), engine.close())
    with pytest.raises(EngineLost, match="closed"):
        await read(stream)
    assert list(session(engine.pid)) == []
