"""One real vLLM server as an engine: bytes that were exported, loaded and exported again, and what ends early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from deploy.demo import long_prompt
from engines.process import EngineProcess
from engines.protocol import (
    Checkpoint,
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
    StoreCommand,
    Token,
)
from engines.spec import EngineSpec
from engines.vllm.engine import VllmEngine
from engines.vllm.spec import VllmSpec
from kvcache.blocks import PageTable
from kvcache.control import Sampling
from kvcache.layout import DType, GroupKind
from tests.engines.harness import Room, layout_of
from tests.engines_vllm.harness import ARGUMENTS, CHUNK, blocks_in_use, vllm_metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")

VLLM_BLOCK = 128
LENGTHS = (5, 511, 513, 639, 3000)
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def room(gemma_dir: Path) -> Room:
    return Room.create(layout_of(gemma_dir, DType.BFLOAT16), pages=6000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm_python: Path, gemma_dir: Path, room: Room) -> AsyncIterator[VllmEngine]:
    layout = room.geometry.layout
    spec = VllmSpec(
        gemma_dir, layout, DType.BFLOAT16, vllm_python, ARGUMENTS, chunk_tokens=CHUNK, max_running=8, max_queue=16
    )
    started = await VllmEngine.start(spec, room.pool)
    yield started
    await started.close()


@pytest.fixture(scope="module")
def text(gemma_dir: Path) -> tuple[int, ...]:
    return tuple(Tokenizer.from_file(str(gemma_dir / "tokenizer.json")).encode(long_prompt(8200)).ids)


async def prefill(
    engine: VllmEngine, job: str, ids: Sequence[int], table: PageTable, salt: str = "", start: int = 0
) -> list[JobEvent]:
    command = PrefillCommand(job, tuple(ids), start, table.stop, table.pages, salt=salt)
    events = [event async for event in engine.submit(command)]
    assert isinstance(events[-1], PrefillFinished), events[-1]
    return events


async def speak(
    engine: VllmEngine, job: str, ids: Sequence[int], table: PageTable | None, salt: str, sampling: Sampling = GREEDY
) -> list[Token]:
    loaded, pages = (0, ()) if table is None else (table.stop, table.pages)
    command = GenerateCommand(job, tuple(ids), loaded, pages, sampling, salt=salt)
    events = [event async for event in engine.submit(command)]
    assert isinstance(events[-1], GenerationFinished), events[-1]
    assert (Loaded(job) in events) == (table is not None)
    return [event for event in events if isinstance(event, Token)]


def gap(token: Token) -> float:
    best, second = sorted({e.token_id: e.logprob for e in token.logprobs or ()}.values(), reverse=True)[:2]
    return best - second


def noise(one: Sequence[Token], other: Sequence[Token]) -> float:
    """Twice the largest difference of a log-probability, while both say the same."""
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        theirs = {entry.token_id: entry.logprob for entry in b.logprobs or ()}
        largest = max([largest, *(abs(e.logprob - theirs.get(e.token_id, e.logprob)) for e in a.logprobs or ())])
        if a.token_id != b.token_id:
            break
    return 2 * largest


@pytest.mark.parametrize("length", LENGTHS)
async def test_what_was_loaded_is_bit_for_bit_what_was_exported(
    engine: VllmEngine, room: Room, text: tuple[int, ...], length: int
) -> None:
    """The same server plays both sides under two salts, so that it computes once and loads once; then it exports what
    it had loaded, out of its own prefix cache.
    """
    ids = text[:length]
    first, again = room.table("first", length - 1), room.table("again", length - 1)
    await prefill(engine, f"p{length}", ids, first, salt=f"computed {length}")
    loaded = await speak(engine, f"d{length}", ids, first, f"loaded {length}")
    await prefill(engine, f"q{length}", ids, again, salt=f"loaded {length}")
    plan = room.plan(length - 1, chunk_tokens=CHUNK)
    whole = (length - 2) // VLLM_BLOCK * VLLM_BLOCK  # what vLLM has as full blocks, and at least one token is computed
    compared = 0
    for piece, one, other in zip(plan.pieces, room.pieces(first, plan), room.pieces(again, plan), strict=True):
        size = len(one) // (piece.stop - piece.start)
        upto = max(0, min(piece.stop, whole) - piece.start) * size
        assert one[:upto] == other[:upto], piece
        compared += upto
    assert compared > 0 or length < VLLM_BLOCK
    alone = await speak(engine, f"a{length}", ids, None, f"alone {length}")
    differing = [n for n, token in enumerate(alone) if token.token_id != loaded[n].token_id]
    if differing:
        assert gap(alone[differing[0]]) < noise(alone, loaded)
    room.owners.release("first")
    room.owners.release("again")


async def test_pages_of_the_embedded_engine_mean_the_same_to_vllm(
    engine: VllmEngine, room: Room, text: tuple[int, ...], gemma_dir: Path
) -> None:
    """Both engines write canonical order: heads, tokens and dims are where the other one looks for them."""
    ids, stop = text[50:750], 699
    theirs, ours = room.table("theirs", stop), room.table("ours", stop)
    embedded = EngineSpec(gemma_dir, DType.BFLOAT16, chunk_tokens=CHUNK, self_check=False)
    other = await EngineProcess.start(embedded, room.pool)
    try:
        done = [event async for event in other.submit(PrefillCommand("far", ids[:stop], 0, stop, theirs.pages))]
        assert isinstance(done[-1], PrefillFinished)
    finally:
        await other.close()
    await prefill(engine, "near", ids, ours, salt="near")
    plan = room.plan(stop, chunk_tokens=CHUNK)
    for piece, a, b in zip(plan.pieces, room.pieces(theirs, plan), room.pieces(ours, plan), strict=True):
        one, two = (torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float() for data in (a, b))
        assert (one - two).norm() < 0.1 * one.norm(), piece
    alone = await speak(engine, "alone", ids, None, "embedded alone")
    mixed = await speak(engine, "mixed", ids, theirs, "embedded mixed")
    differing = [n for n, token in enumerate(alone) if token.token_id != mixed[n].token_id]
    if differing:
        assert gap(alone[differing[0]]) < noise(alone, mixed)
    room.owners.release("theirs")
    room.owners.release("ours")


async def test_a_prefill_leaves_layer_by_layer(engine: VllmEngine, room: Room, text: tuple[int, ...]) -> None:
    table = room.table("a", 1500)
    events = await prefill(engine, "layers", text[100:1601], table, salt="layers")
    told = [event.next_seq for event in events if isinstance(event, Exported)]
    assert told == sorted(told)
    assert len(told) > 12, "every full layer of every chunk, and then layer by layer"
    room.owners.release("a")


async def test_an_increment_goes_on_from_what_the_node_has_cached(
    engine: VllmEngine, room: Room, text: tuple[int, ...]
) -> None:
    """The snapshot at 1024 that the first job offered is what the second one begins with."""
    ids = text[200:1800]
    first, snapshot = room.table("first", 1100), room.table("snapshot", 1024, start=1024)
    command = PrefillCommand("one", ids[:1100], 0, 1100, first.pages, checkpoints=(Checkpoint(1024, 1024),), salt="s1")
    async for event in engine.submit(command):
        if isinstance(event, Offered):
            engine.store(StoreCommand("one", 1024, snapshot.pages))
    kept: list[int] = []
    for g, n in room.geometry.layers():
        full = room.geometry.layout.groups[g].kind is GroupKind.FULL
        kept += first.layer(g, n)[:16] if full else snapshot.layer(g, n)
    before = vllm_metrics(engine.pid)["vllm:prompt_tokens_total"]
    second = room.table("second", 1599, start=1024)
    command = PrefillCommand("two", ids, 1024, 1599, second.pages, cached=1024, cached_pages=tuple(kept), salt="s2")
    events = [event async for event in engine.submit(command)]
    assert isinstance(events[-1], PrefillFinished), events[-1]
    metrics = vllm_metrics(engine.pid)
    assert metrics["vllm:prompt_tokens_total"] > before
    assert metrics["vllm:prfaas_loaded_tokens_total"] >= 1024
    whole = room.table("whole", 1599)
    await prefill(engine, "three", ids, whole, salt="s2")  # from what vLLM cached of the second: the same bytes
    joined = {(p.group, p.layer, p.tensor, p.start): data for p, data in _pieces(room, whole, 0)}
    for piece, data in _pieces(room, second, 1024):
        if piece.stop <= 1536 and room.geometry.layout.groups[piece.group].kind is GroupKind.FULL:
            assert joined[piece.group, piece.layer, piece.tensor, piece.start] == data
    for owner in ("first", "snapshot", "second", "whole"):
        room.owners.release(owner)


def _pieces(room: Room, table: PageTable, start: int):  # type: ignore[no-untyped-def]
    plan = room.plan(table.stop, start=start, chunk_tokens=CHUNK)
    return zip(plan.pieces, room.pieces(table, plan), strict=True)


async def test_eight_at_once_differ_only_as_the_server_alone_would(
    engine: VllmEngine, room: Room, text: tuple[int, ...]
) -> None:
    prompts = [text[at * 50 : at * 50 + 120 + 90 * at] for at in range(8)]
    alone = [await speak(engine, f"x{n}", ids, None, f"alone{n}") for n, ids in enumerate(prompts)]
    jobs = [speak(engine, f"y{n}", ids, None, f"together{n}") for n, ids in enumerate(prompts)]
    together = await asyncio.gather(*jobs)
    bound = max(noise(one, other) for one, other in zip(alone, together, strict=True))

    async def split(n: int, ids: tuple[int, ...]) -> list[Token]:
        table = room.table(f"t{n}", len(ids) - 1)
        await prefill(engine, f"e{n}", ids, table, salt=f"far{n}")
        said = await speak(engine, f"g{n}", ids, table, f"near{n}")
        room.owners.release(f"t{n}")
        return said

    both = await asyncio.gather(*(split(n, ids) for n, ids in enumerate(prompts)))
    for one, other in zip(alone, both, strict=True):
        differing = [n for n, token in enumerate(one) if token.token_id != other[n].token_id]
        if differing:
            assert gap(one[differing[0]]) < max(bound, noise(one, other))


@pytest.mark.parametrize("kind", ["prefill", "load"])
async def test_a_cancel_is_heard_within_a_chunk_and_frees_every_block(
    engine: VllmEngine, room: Room, text: tuple[int, ...], kind: str
) -> None:
    ids, table = text[:8000], room.table("c", 7999)
    if kind == "prefill":
        stream = engine.submit(PrefillCommand("c", ids, 0, 7999, table.pages, salt="cancelled"))
        assert isinstance(await anext(stream), Exported)
    else:
        stream = engine.submit(GenerateCommand("c", ids, 7999, table.pages, GREEDY, salt="cancelled too"))
    began = time.monotonic()
    await engine.cancel("c")
    rest = [event async for event in stream]
    assert isinstance(rest[-1], JobCancelled)
    assert time.monotonic() - began < 5
    deadline = time.monotonic() + 10
    while blocks_in_use(engine.pid) > 0:
        assert time.monotonic() < deadline, "blocks of a cancelled job are still held"
        await asyncio.sleep(0.2)
    room.owners.release("c")


async def test_what_vllm_does_not_know_it_refuses(engine: VllmEngine, text: tuple[int, ...]) -> None:
    sampling = Sampling(max_tokens=4, top_p=7.0)
    events = [event async for event in engine.submit(GenerateCommand("bad", text[:20], 0, (), sampling))]
    assert len(events) == 1
    assert isinstance(events[0], JobFailed)
    assert "top_p" in events[0].detail
