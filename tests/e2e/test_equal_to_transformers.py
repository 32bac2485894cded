"""The whole stack, processes and wire included, against plain transformers (fp32) and against one engine alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from deploy.reference import ReferenceEngine, TransferRange
from kvcache.layout import DType
from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import RunningStack, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LENGTHS = (1, 2, 63, 64, 65, 511, 512, 513, 1000, 4097)
TOKENS = 16
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Bench:
    """One architecture: plain transformers, one engine alone, and a running stack."""

    plain: PlainModel
    engine: ReferenceEngine
    runner: asyncio.Runner
    stack: RunningStack

    def digest(self, prompt: list[int], chunk_tokens: int) -> bytes:
        """The KV of all but the last token, as one engine alone computes it."""
        extent = TransferRange(0, len(prompt) - 1, chunk_tokens)
        return self.runner.run(self.engine.digest(tuple(prompt), extent))


@pytest.fixture(scope="module", params=["deepseek_v3", "gemma3_text", "qwen3_next", "falcon_h1"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = tiny_model(request.param, tmp_path_factory.mktemp("model") / request.param)
    with running_stack(directory, tmp_path_factory.mktemp("logs")) as stack, asyncio.Runner() as runner:
        engine = ReferenceEngine(directory, DType.FLOAT32, max(LENGTHS), CHUNK)
        runner.run(engine.__aenter__())
        try:
            yield Bench(PlainModel(directory), engine, runner, stack)
        finally:
            runner.run(engine.__aexit__())


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_and_logits_equal_plain_transformers(bench: Bench, length: int) -> None:
    prompt = some_ids(length)
    answer = bench.stack.complete(prompt, TOKENS, hint="remote", logprobs=0)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    expected = bench.plain.speak(prompt, TOKENS)
    assert choice["token_ids"] == expected.token_ids
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-3)
    assert answer.headers["x-prfaas-route"] == ("remote:east" if length > 1 else "local")


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1])
@pytest.mark.parametrize("hint", ["remote", "local"])
def test_committed_kv_equals_that_of_one_engine(bench: Bench, length: int, hint: str) -> None:
    prompt = some_ids(length, seed=2 if hint == "remote" else 3)  # new to every cache
    answer = bench.stack.complete(prompt, 1, hint=hint)
    assert answer.status_code == 200, answer.text
    (attempt,) = bench.stack.record(answer)["attempts"]
    assert attempt["cluster"] == ("east" if hint == "remote" else "local")
    assert attempt["range"] == [0, length - 1]
    assert attempt["kv_digest"] == bench.digest(prompt, attempt["chunk_tokens"]).hex()
    assert set(attempt["transports_ordered"]) == ({"tcp"} if hint == "remote" else {"shm", "tcp"})
    assert attempt["transport"] == attempt["transports_ordered"][0]


def test_nothing_is_held_afterwards(bench: Bench) -> None:
    bench.stack.await_idle()
