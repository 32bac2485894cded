"""A crowd of requests of which many leave at any moment: those that stay are answered right, nothing is kept."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import RunningStack, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REQUESTS = 120
AT_ONCE = 24
POOL_MIB = 8
LENGTHS = (1, 2, 3, 64, 65, 200, 511, 777, 1500, 3000)


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: its prompt and answer, its way, and when it leaves, if it does."""

    prompt: list[int]
    tokens: int
    hint: str
    leaves_after_s: float | None


def visits(seed: int) -> list[Visit]:
    source = random.Random(seed)
    return [
        Visit(
            some_ids(source.choice(LENGTHS), seed=number),
            source.randrange(1, 12),
            source.choice(["remote", "remote", "local"]),
            source.random() if source.random() < 0.3 else None,
        )
        for number in range(REQUESTS)
    ]


def send(stack: RunningStack, visit: Visit) -> list[int] | None:
    """The answer's token ids; None for one that may have left."""
    if visit.leaves_after_s is None:
        answer = stack.complete(visit.prompt, visit.tokens, hint=visit.hint)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids
    with httpx.Client(base_url=stack.stack.url, timeout=visit.leaves_after_s + 0.01) as hasty:
        body = stack.body(visit.prompt, visit.tokens, stream=True)
        try:
            hasty.post("/v1/completions", json=body, headers={"x-prfaas-route-hint": visit.hint})
        except httpx.TimeoutException:
            return None
    return None


def test_a_crowd_that_comes_and_leaves(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "llama")
    crowd = visits(seed=5)
    with running_stack(model, tmp_path / "logs", pool_mib=POOL_MIB) as stack:
        with ThreadPoolExecutor(AT_ONCE) as senders:
            answers = list(senders.map(lambda visit: send(stack, visit), crowd))
        plain = PlainModel(model)
        stayed = [(visit, answer) for visit, answer in zip(crowd, answers, strict=True) if answer is not None]
        assert len(stayed) > REQUESTS / 2
        for visit, answer in stayed:
            assert answer == plain.speak(visit.prompt, visit.tokens).token_ids
        stack.await_idle(10)
