"""The whole path on a real model in bf16: the main job, eight requests at once, a client that leaves."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from deploy.demo import long_prompt
from engines.process import EngineProcess
from engines.protocol import GenerateCommand, Token
from engines.spec import EngineSpec
from kvcache.control import Sampling
from kvcache.hostpool import HostPool
from kvcache.layout import DType
from tests.stacks import RunningStack, eventually, running_stack

pytestmark = [pytest.mark.gemma, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parent.parent.parent
TOKENS = 24
LIKELIEST = 20
LENGTHS = (90, 150, 260, 400, 520, 700, 900, 1100)


@pytest.fixture(scope="module")
def stack(gemma_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(gemma_dir, tmp_path_factory.mktemp("logs"), dtype="bfloat16", pool_mib=256) as stack:
        yield stack


def prompts(gemma_dir: Path) -> list[tuple[int, ...]]:
    ids = Tokenizer.from_file(str(gemma_dir / "tokenizer.json")).encode(long_prompt(max(LENGTHS))).ids
    return [tuple(ids[:length]) for length in LENGTHS]


@asynccontextmanager
async def lone_engine(gemma_dir: Path) -> AsyncIterator[EngineProcess]:
    pool = HostPool.create(4096, 1)
    engine = await EngineProcess.start(EngineSpec(gemma_dir, DType.BFLOAT16, self_check=False), pool)
    try:
        yield engine
    finally:
        await engine.close()
        pool.close()


async def speak(engine: EngineProcess, job: str, prompt: tuple[int, ...]) -> list[Token]:
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=LIKELIEST)
    events = [event async for event in engine.submit(GenerateCommand(job, prompt, 0, (), sampling))]
    return [event for event in events if isinstance(event, Token)]


async def alone_and_together(gemma_dir: Path) -> tuple[list[list[Token]], list[list[Token]]]:
    """The same requests one by one and all at once, on one engine."""
    asked = prompts(gemma_dir)
    async with lone_engine(gemma_dir) as engine:
        alone = [await speak(engine, f"alone-{n}", prompt) for n, prompt in enumerate(asked)]
        jobs = [speak(engine, f"together-{n}", prompt) for n, prompt in enumerate(asked)]
        return alone, list(await asyncio.gather(*jobs))


def noise(alone: Sequence[Sequence[Token]], together: Sequence[Sequence[Token]]) -> float:
    """Twice the largest difference of a log-probability between the two runs, while they say the same."""
    largest = 0.0
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            theirs = {entry.token_id: entry.logprob for entry in b.logprobs or ()}
            shared = [abs(e.logprob - theirs[e.token_id]) for e in a.logprobs or () if e.token_id in theirs]
            largest = max([largest, *shared])
            if a.token_id != b.token_id:
                break
    return 2 * largest


def gap(token: Token) -> float:
    """Between the likeliest token and the next."""
    best, second = sorted({e.token_id: e.logprob for e in token.logprobs or ()}.values(), reverse=True)[:2]
    return best - second


def test_eight_requests_at_once_differ_only_where_the_engine_alone_would(stack: RunningStack, gemma_dir: Path) -> None:
    alone, together = asyncio.run(alone_and_together(gemma_dir))
    bound = noise(alone, together)
    asked = prompts(gemma_dir)
    hints = ["remote", "local"] * (len(asked) // 2)
    with ThreadPoolExecutor(len(asked)) as senders:
        answers = list(senders.map(lambda p, h: stack.complete(p, TOKENS, hint=h), asked, hints))
    for length, expected, answer in zip(LENGTHS, alone, answers, strict=True):
        assert answer.status_code == 200, answer.text
        got = answer.json()["choices"][0]["token_ids"]
        assert len(got) == TOKENS
        differing = [n for n, token in enumerate(expected) if token.token_id != got[n]]
        if differing:
            first = expected[differing[0]]
            assert gap(first) < bound, f"{length} tokens: diverged at {differing[0]}, gap {gap(first)}, noise {bound}"
    stack.await_idle()


def test_a_client_that_leaves_stops_the_remote_prefill_within_a_chunk(stack: RunningStack, gemma_dir: Path) -> None:
    prompt = Tokenizer.from_file(str(gemma_dir / "tokenizer.json")).encode(long_prompt(8000)).ids[:8000]
    body = stack.body(prompt, 4, stream=True)
    headers = {"x-prfaas-route-hint": "remote"}
    before = cancels(stack)
    with (
        httpx.Client(base_url=stack.stack.url, timeout=2.0) as hasty,
        pytest.raises(httpx.ReadTimeout),
        hasty.stream("POST", "/v1/completions", json=body, headers=headers),
    ):
        pass
    left = time.monotonic()
    assert eventually(lambda: cancels(stack)[0] >= before[0] + 2, 10)  # both legs have said that they hold nothing
    count, seconds = cancels(stack)
    chunk_s = 256 / stack.nodes()["east-prefill"]["heartbeat"]["prefill_tokens_per_s"]
    assert seconds - before[1] < (count - before[0]) * (4 * chunk_s + 0.5)
    stack.await_idle(5)
    assert time.monotonic() - left < 8000 / 256 * chunk_s / 2  # far less than what was left to compute


def cancels(stack: RunningStack) -> tuple[int, float]:
    """How many cancels nodes have answered, and the seconds they took in total."""
    text = stack.http.get("/metrics").text
    figures = [re.search(rf"^prfaas_cancel_seconds_{name} (\S+)$", text, re.M) for name in ("count", "sum")]
    count, total = [float(figure[1]) if figure else 0.0 for figure in figures]
    return int(count), total


def test_the_main_job_ends_with_equal_kv_and_equal_tokens(gemma_dir: Path, tmp_path: Path) -> None:
    run = "from deploy.cli import up; up()"
    options = ["--once", "--json", "--port", "0", "--model", str(gemma_dir), "--log-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", run, *options], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    short, long = json.loads(done.stdout)
    assert (short["route"], long["route"]) == ("local", "remote:east")
    assert short["kv_equal"] is True
    assert long["kv_equal"] is True
    assert short["tokens_equal"] is True
    assert long["tokens_equal"] is True
    assert 0 < long["wire_bytes"] < long["raw_bytes"]
