"""Gemma 3 270M in bf16, where its converted directory is at hand: real windows, a real vocabulary, real rounding."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from engines.process import EngineProcess
from engines.spec import EngineSpec
from kvcache.control import Sampling
from kvcache.layout import DType
from tests.engines.harness import Room, Spoken, generate, layout_of, prefill

MODEL = os.environ.get("PRFAAS_TEST_GEMMA", "")

pytestmark = [
    pytest.mark.gemma,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not MODEL, reason="PRFAAS_TEST_GEMMA names no converted Gemma 3 270M directory"),
]

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = "The capital of France is Paris, and the river that runs through it is the Seine. " * 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[tuple[EngineProcess, Room]]:
    path = Path(MODEL)
    room = Room.create(layout_of(path, DType.BFLOAT16), pages=3000)
    started = time.monotonic()
    process = await EngineProcess.start(EngineSpec(path, DType.BFLOAT16), room.pool)
    print(f"ready after {time.monotonic() - started:.1f} s: {process.info}")
    yield process, room
    await process.close()
    room.pool.close()


def encode(text: str) -> tuple[int, ...]:
    ids = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json")).encode(text).ids
    return tuple(ids if ids[0] == 2 else [2, *ids])


async def test_it_speaks_the_known_answer(engine: tuple[EngineProcess, Room]) -> None:
    spoken = await generate(engine[0], "france", encode("The capital of France is"), GREEDY)
    text = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json")).decode(spoken.tokens)
    assert text.strip().startswith("the capital of the country of France")


async def test_a_long_split_prompt_equals_the_same_plan_in_place(engine: tuple[EngineProcess, Room]) -> None:
    process, room = engine
    ids = encode(TEXT)
    assert len(ids) > 2 * 512
    table = room.table("long", len(ids) - 1)
    await prefill(process, "long", ids, table)
    plan = room.plan(len(ids) - 1)
    assert sum(map(len, room.pieces(table, plan))) == room.geometry.layout.s_kv(len(ids) - 1)
    loaded = await generate(process, "loaded", ids, GREEDY, table)
    in_place = await generate(process, "in-place", ids, GREEDY)
    assert loaded.tokens == in_place.tokens
    room.owners.release("long")


async def test_eight_at_once_diverge_from_solo_runs_only_within_the_batch_noise(
    engine: tuple[EngineProcess, Room],
) -> None:
    process, _ = engine
    scored = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20)
    prompts = [encode(TEXT)[: 20 + 83 * n] for n in range(8)]
    alone = [await generate(process, f"alone-{n}", ids, scored) for n, ids in enumerate(prompts)]
    together = await asyncio.gather(*(generate(process, f"both-{n}", ids, scored) for n, ids in enumerate(prompts)))
    noise = max(difference(solo, crowd) for solo, crowd in zip(alone, together, strict=True))
    assert noise < 1.0
    for solo, crowd in zip(alone, together, strict=True):
        for a, b, logprobs in zip(solo.tokens, crowd.tokens, solo.logprobs, strict=True):
            if a != b:
                assert logprobs is not None
                assert logprobs[1].logprob - logprobs[2].logprob <= 2 * noise
                break


def difference(solo: Spoken, crowd: Spoken) -> float:
    """The largest difference of log-probabilities of likely tokens, up to the first divergence."""
    worst = 0.0
    for a, b, first, second in zip(solo.tokens, crowd.tokens, solo.logprobs, crowd.logprobs, strict=True):
        assert first is not None
        assert second is not None
        other = {entry.token_id: entry.logprob for entry in second}
        worst = max([worst, *(abs(e.logprob - other[e.token_id]) for e in first if e.token_id in other)])
        if a != b:
            break
    return worst
