"""A conversation's second turn over the whole stack: only what is new is computed, and only that crosses the link."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from deploy.demo import long_prompt
from engines.protocol import Token
from kvcache.layout import DType, GroupKind, KVLayout
from kvcache.layout_configs import layout_from_config
from tests.e2e.test_gemma import TOKENS, gap, lone_engine, noise, speak
from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import RunningStack, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK = 64
SPOKEN = 70


def layout_of(directory: Path, dtype: DType) -> KVLayout:
    return layout_from_config(json.loads((directory / "config.json").read_text()), dtype)


def bytes_between(layout: KVLayout, start: int, stop: int) -> int:
    """Full attention from ``start`` on, windows and states whole."""
    full = sum(layer.nbytes for g in layout.groups if g.kind is GroupKind.FULL for layer in g.layers)
    return layout.s_kv(stop) - full * start


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def say(
    stack: RunningStack, prompt: list[int], tokens: int, hint: str, **more: Any
) -> tuple[httpx.Response, list[int]]:
    answer = stack.complete(prompt, tokens, hint=hint, logprobs=0, **more)
    assert answer.status_code == 200, answer.text
    return answer, answer.json()["choices"][0]["token_ids"]


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def settle(stack: RunningStack) -> None:
    """Wait until nothing is at hand and a beat has told what the decode node keeps: what it stored was told before."""
    stack.await_idle()
    deadline = time.monotonic() + 10
    while not all(n["heartbeat"]["pages_cached"] for n in stack.nodes().values() if n["role"] == "decode"):
        assert time.monotonic() < deadline, "the decode node keeps nothing"
        time.sleep(0.1)


@pytest.fixture(scope="module", params=["qwen3_next", "gemma3_text"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(model_dir, tmp_path_factory.mktemp("logs")) as stack:
        yield stack


def test_turns_are_shortened_on_every_way_and_say_what_transformers_do(stack: RunningStack, model_dir: Path) -> None:
    layout, plain = layout_of(model_dir, DType.FLOAT32), PlainModel(model_dir)
    talk = some_ids(1500)
    answer, spoken = say(stack, talk, SPOKEN, "remote")
    assert cached(answer) == 0
    for turn, hint in enumerate(("remote", "remote", "local")):
        held, resumable = whole_blocks(len(talk) - 1 + SPOKEN), whole_blocks(len(talk) - 1)
        settle(stack)
        talk = [*talk, *spoken, *some_ids(150, seed=turn + 2)]
        expected = plain.speak(talk, SPOKEN)
        answer, spoken = say(stack, talk, SPOKEN, hint)
        assert spoken == expected.token_ids
        logprobs = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        (attempt,) = stack.record(answer)["attempts"]
        assert attempt["range"] == [held, len(talk) - 1]
        assert attempt["raw_bytes"] == bytes_between(layout, held, len(talk) - 1)
        assert cached(answer) == (resumable if hint == "remote" else 0), "the other cluster has not seen it yet"
    stack.await_idle()


async def alone_and_in_company(gemma_dir: Path, talk: list[int]) -> tuple[list[list[Token]], list[list[Token]]]:
    """The talk and seven short prompts on one engine, one by one and all at once."""
    asked = [tuple(talk), *(tuple(talk[n * 300 : n * 300 + 90 + 60 * n]) for n in range(1, 8))]
    async with lone_engine(gemma_dir) as engine:
        alone = [await speak(engine, f"alone-{n}", prompt) for n, prompt in enumerate(asked)]
        company = [speak(engine, f"together-{n}", prompt) for n, prompt in enumerate(asked)]
        return alone, list(await asyncio.gather(*company))


@pytest.mark.gemma
@pytest.mark.long
def test_a_second_turn_of_6k_tokens_sends_its_increment_and_the_windows(gemma_dir: Path, tmp_path: Path) -> None:
    layout = layout_of(gemma_dir, DType.BFLOAT16)
    talk = Tokenizer.from_file(str(gemma_dir / "tokenizer.json")).encode(long_prompt(6000)).ids[:6000]
    options = {"dtype": "bfloat16", "pool_mib": 256, "gateway_options": ("--remote-codec", "raw")}
    with running_stack(gemma_dir, tmp_path / "logs", **options) as stack:
        answer, spoken = say(stack, talk, SPOKEN, "remote")
        held, resumable = whole_blocks(len(talk) - 1 + SPOKEN), whole_blocks(len(talk) - 1)
        settle(stack)
        talk = [*talk, *spoken, *talk[100:400]]
        answer, spoken = say(stack, talk, TOKENS, "remote")
        (attempt,) = stack.record(answer)["attempts"]
        stack.await_idle()
    expected = bytes_between(layout, held, len(talk) - 1)
    assert attempt["range"] == [held, len(talk) - 1]
    assert attempt["raw_bytes"] == expected
    assert attempt["codec"] == "raw"
    assert attempt["wire_bytes"] == pytest.approx(expected, rel=0.05)
    assert cached(answer) == resumable
    ones, together = asyncio.run(alone_and_in_company(gemma_dir, talk))
    differing = [n for n, token in enumerate(ones[0]) if token.token_id != spoken[n]]
    assert not differing or gap(ones[0][differing[0]]) < noise(ones, together)
