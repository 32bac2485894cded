"""A conversation that another cluster began goes on at home, and the other way round: its cached prefix is moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.layout import DType
from tests.e2e.test_second_turn import bytes_between, cached, layout_of, say, whole_blocks
from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import RunningStack, eventually, node, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPOKEN = 6
NODES = (node("p-east", "east", "prefill"), node("p-local", "local", "prefill"), node("d", "local", "decode"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3_next", tmp_path_factory.mktemp("model") / "qwen3_next")


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(model_dir, tmp_path_factory.mktemp("logs"), nodes=NODES) as stack:
        yield stack


def turn(stack: RunningStack, plain: PlainModel, talk: list[int], hint: str) -> tuple[list[int], dict[str, Any]]:
    """What transformers would have said, too; and the record of its one attempt."""
    answer, spoken = say(stack, talk, SPOKEN, hint)
    expected = plain.speak(talk, SPOKEN)
    assert spoken == expected.token_ids
    logprobs = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    stack.await_idle()
    [attempt] = stack.record(answer)["attempts"]
    return spoken, attempt | {"cached_in_usage": cached(answer)}


@pytest.mark.parametrize(("first", "then", "source"), [("remote", "local", "p-east"), ("local", "remote", "p-local")])
def test_a_prefix_is_moved_to_where_the_next_turn_is_prefilled(
    stack: RunningStack, model_dir: Path, first: str, then: str, source: str
) -> None:
    layout, plain = layout_of(model_dir, DType.FLOAT32), PlainModel(model_dir)
    seed = 10 if first == "remote" else 40
    moved: list[dict[str, Any]] = []

    def moves() -> bool:
        """Two turns of one more conversation. Ways are measured by and by: until then nothing is moved."""
        talk = some_ids(1500 + 64 * len(moved), seed=seed + len(moved))
        spoken, _ = turn(stack, plain, talk, first)
        _, attempt = turn(stack, plain, [*talk, *spoken, *some_ids(150, seed=seed)], then)
        kept = whole_blocks(len(talk) - 1)
        moved.append(attempt | {"kept": kept})
        return attempt.get("move", {}).get("outcome") == "moved"

    assert eventually(moves, 60.0, every_s=0.5), moved
    attempt = moved[-1]
    move, kept = attempt["move"], attempt["kept"]
    assert (move["outcome"], move["source_node"], move["range"]) == ("moved", source, [0, kept])
    assert move["raw_bytes"] == bytes_between(layout, 0, kept)
    assert move["wire_bytes"] == move["raw_bytes"]
    assert attempt["cached_tokens"] == attempt["cached_in_usage"] == kept
    assert all(one["cached_in_usage"] == 0 for one in moved[:-1])
