"""A node whose pool is too small for its conversations goes on with them from files, over a crash, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_model
from tests.stacks import RunningStack, eventually, node, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS, MORE = 1025, 65
PROMPTS = [some_ids(TOKENS, seed=seed) for seed in range(1, 15)]
ENTRIES = 17
"""Of each prompt: sixteen blocks and a snapshot."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def stack(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The pool of the prefill node holds less than a quarter of the prompts; the decode node keeps nothing."""
    scratch = tmp_path_factory.mktemp("stack")
    nodes = (
        node("p", "local", "prefill", "--tier-disk", str(directory), "--pool-mib", "2"),
        node("d", "local", "decode", "--no-prefix-cache"),
    )
    with running_stack(tiny_model("gemma3_text", scratch / "tiny"), scratch / "logs", nodes=nodes) as running:
        yield running


def asked(stack: RunningStack, ids: list[int]) -> dict[str, Any]:
    """The one attempt of a request, and the facts about its prefill node."""
    answer = stack.complete(ids, 2, hint="local")
    assert answer.status_code == 200, answer.text
    record = stack.record(answer)
    (attempt,) = record["attempts"]
    (cluster,) = (one for one in record["decision"]["facts"]["clusters"] if one["local"])
    return attempt | {"node": cluster["nodes"][0], "said": answer.json()["choices"][0]["token_ids"]}


def tier(stack: RunningStack) -> dict[str, Any]:
    found: dict[str, Any] = stack.nodes()["p"]["heartbeat"]["tiers"][0]
    return found


def test_what_was_computed_once_is_read_back_and_known_to_be_there(stack: RunningStack, directory: Path) -> None:
    for prompt in PROMPTS:
        asked(stack, prompt)
    assert eventually(lambda: tier(stack)["entries"] >= ENTRIES * (len(PROMPTS) - 4), 5)
    second = [asked(stack, prompt + some_ids(MORE, seed=99)) for prompt in PROMPTS[:3]]
    assert [each["node"]["held_tokens"] for each in second] == [1024] * 3, "the gateway knows that they are there"
    assert second[0]["cached_tokens"] == 1024, "nobody knows yet that reading took longer than computing"
    assert eventually(lambda: tier(stack)["hits"] >= 1, 5)
    assert tier(stack)["damaged"] == 0


def test_a_node_that_was_killed_finds_its_files_again_and_says_the_same(stack: RunningStack, directory: Path) -> None:
    before = asked(stack, PROMPTS[0] + some_ids(MORE, seed=7))
    (spec,) = (one for one in stack.stack.spec.nodes if one.name == "p")
    os.killpg(stack.stack.processes["p"].pid, signal.SIGKILL)
    assert eventually(lambda: "p" not in stack.nodes(), 10)
    assert any(directory.rglob("*.block"))
    stack.stack.start_node(spec)
    stack.stack.await_node(spec)
    assert eventually(lambda: tier(stack)["entries"] >= ENTRIES * (len(PROMPTS) - 4), 10)
    again = asked(stack, PROMPTS[1] + some_ids(MORE, seed=8))
    assert again["node"]["cached_tokens"] == again["cached_tokens"] == 1024
    whole = asked(stack, PROMPTS[0] + some_ids(MORE, seed=7))
    assert whole["said"] == before["said"]
    assert whole["kv_digest"] == before["kv_digest"]


def test_an_orderly_stop_leaves_nothing(stack: RunningStack, directory: Path) -> None:
    process = stack.stack.processes["p"]
    process.terminate()
    assert eventually(lambda: not process.running, 10)
    assert not any(path.is_file() for path in directory.rglob("*.*"))
