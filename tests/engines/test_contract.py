"""Two engines and two pools against plain transformers, in fp32: the promise that a split prefill changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engines.process import EngineProcess
from engines.protocol import Exported
from kvcache.layout import GroupKind
from tests.engines.harness import CHUNK, GREEDY_LOGPROBS, Room, Spoken, generate, layout_of, prefill, prompt, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = ["llama", "gemma3_text:64", "gemma3_text:600", "qwen3_next", "deepseek_v3", "falcon_h1"]
LENGTHS = [1, 2, 63, 64, 65, 511, 512, 513, 1000, 4097]


@dataclass
class Pair:
    """A prefill engine, a decode engine, a pool for each, and the same model in plain transformers."""

    prefill: EngineProcess
    decode: EngineProcess
    near: Room
    far: Room
    plain: Any

    async def split(self, job: str, ids: tuple[int, ...]) -> tuple[list[bytes], Spoken]:
        """Prefill here, carry the bytes, speak there; returns the pieces and what was spoken."""
        stop = len(ids) - 1
        if not stop:
            return [], await generate(self.decode, job, ids, GREEDY_LOGPROBS)
        plan = self.near.plan(stop)
        table, other = self.near.table(job, stop), self.far.table(job, stop)
        events = await prefill(self.prefill, job, ids, table)
        assert events[-2] == Exported(job, len(plan.pieces))
        pieces = self.near.pieces(table, plan)
        self.far.fill(other, plan, pieces)
        spoken = await generate(self.decode, job, ids, GREEDY_LOGPROBS, other)
        assert spoken.loaded
        self.near.owners.release(job)
        self.far.owners.release(job)
        return pieces, spoken


@torch.inference_mode()
def plain_greedy(model: Any, ids: tuple[int, ...], count: int) -> tuple[torch.Tensor, list[int]]:
    """First log-probabilities and greedy tokens of transformers, the prompt read in one piece."""
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    first, tokens = logits.log_softmax(-1), [int(logits.argmax())]
    while len(tokens) < count:
        step = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1]
        tokens.append(int(step.argmax()))
    return first, tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODELS)
async def pair(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> AsyncIterator[Pair]:
    path = model_dir(request.param)
    near, far = Room.create(layout_of(path)), Room.create(layout_of(path), pages=2100)
    far.owners.allocate("another", 37)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    async with running(path, near) as first, running(path, far) as second:
        yield Pair(first, second, near, far, plain)
    near.pool.close()
    far.pool.close()


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_split_prompt_speaks_as_plain_transformers_do(pair: Pair, length: int) -> None:
    ids = prompt(length)
    pieces, spoken = await pair.split(f"split-{length}", ids)
    assert sum(map(len, pieces)) == pair.near.geometry.layout.s_kv(length - 1)
    first, greedy = plain_greedy(pair.plain, ids, len(spoken.tokens))
    assert (spoken.vector(0) - first).abs().max() < 1e-3
    assert spoken.tokens == greedy
    assert spoken.reason == "length"


async def test_the_exported_bytes_are_the_cache_of_transformers_in_canonical_order(pair: Pair) -> None:
    ids = prompt(701)
    pieces, _ = await pair.split("canonical", ids)
    cache = DynamicCache(config=pair.plain.config)
    with torch.inference_mode():
        pair.plain.model(torch.tensor([ids[:-1]]), past_key_values=cache, use_cache=True)
    plan = pair.near.plan(700)
    for piece, data in zip(plan.pieces, pieces, strict=True):
        group = plan.layout.groups[piece.group]
        layer: Any = cache.layers[group.layers[piece.layer].index]
        got = torch.frombuffer(bytearray(data), dtype=torch.float32).view(plan.shape(piece))
        if group.kind is GroupKind.STATE:
            expected = (layer.conv_states, layer.recurrent_states)[piece.tensor][0][0]
        else:
            held = (layer.keys, layer.values)[piece.tensor][0].transpose(0, 1)
            oldest = 700 - held.shape[0]
            expected = held[piece.start - oldest : piece.stop - oldest]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


async def test_an_increment_exports_what_the_whole_prefill_does(pair: Pair) -> None:
    ids = prompt(701)
    whole, part = pair.near.table("whole", 700), pair.near.table("part", 700, start=320)
    await prefill(pair.prefill, "whole", ids, whole)
    await prefill(pair.prefill, "part", ids, part)
    plan = pair.near.plan(700, start=320)
    assert pair.near.pieces(part, plan) == pair.near.pieces(whole, plan)
    pair.near.owners.release("whole")
    pair.near.owners.release("part")


async def test_eight_requests_at_once_speak_as_they_do_alone(pair: Pair) -> None:
    prompts = [prompt(length, seed=7) for length in (1, 40, 70, 130, 257, 300, 520, 900)]
    alone = [(await pair.split(f"alone-{n}", ids))[1] for n, ids in enumerate(prompts)]
    together = [s for _, s in await asyncio.gather(*(pair.split(f"both-{n}", ids) for n, ids in enumerate(prompts)))]
    noise = 0.0
    for solo, crowd in zip(alone, together, strict=True):
        for step in range(len(solo.tokens)):
            noise = max(noise, float((solo.vector(step) - crowd.vector(step)).abs().max()))
            if solo.tokens[step] != crowd.tokens[step]:
                break
    assert noise < 1e-3
    for solo, crowd in zip(alone, together, strict=True):
        for step, (a, b) in enumerate(zip(solo.tokens, crowd.tokens, strict=True)):
            if a != b:
                best = solo.vector(step).topk(2).values
                assert float(best[0] - best[1]) < 2 * noise, f"diverged at step {step} with no tie"
                break


async def test_a_prefill_in_place_equals_a_loaded_one(pair: Pair) -> None:
    ids = prompt(600)
    _, loaded = await pair.split("loaded", ids)
    in_place = await generate(pair.decode, "in-place", ids, GREEDY_LOGPROBS)
    assert in_place.tokens == loaded.tokens
    assert torch.equal(in_place.vector(0), loaded.vector(0)), "same plan, same machine: bit-equal"


async def test_the_engine_says_what_it_loaded(pair: Pair) -> None:
    info = pair.prefill.info
    assert (info.dtype, info.context_tokens, info.vocab_size) == ("float32", 8192, 512)
    assert info.chunk_tokens == CHUNK
    assert info.prefill_tokens_per_s > 0
    assert info.decode_tokens_per_s > 0
