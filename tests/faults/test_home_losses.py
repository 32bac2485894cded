"""What is lost at home: the local prefill node, the decode node, the gateway itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.plain import PlainModel
from tests.stacks import RunningStack, eventually, running_stack, send_signal, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("gemma3_text", tmp_path_factory.mktemp("model") / "gemma3_text")


@pytest.fixture
def stack(model: Path, tmp_path: Path) -> Iterator[RunningStack]:
    state = ("--state", str(tmp_path / "state.db"))
    with running_stack(model, tmp_path / "logs", gateway_options=state) as stack:
        yield stack


def kill(stack: RunningStack, name: str) -> None:
    process = stack.stack.processes[name]
    send_signal(process.pid, signal.SIGKILL)
    assert eventually(lambda: not process.running, 5)


def test_without_its_prefill_node_the_home_prefills_in_place_and_says_so(stack: RunningStack, model: Path) -> None:
    kill(stack, "local-prefill")
    assert eventually(lambda: "local-prefill" not in stack.nodes(), 5)
    prompt = some_ids(300)
    answer = stack.complete(prompt, TOKENS, hint="local")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prfaas-route"] == "local"
    assert answer.headers["x-prfaas-prefill"] == "in-place"
    assert answer.json()["choices"][0]["token_ids"] == PlainModel(model).speak(prompt, TOKENS).token_ids


def test_without_its_decode_node_nothing_is_answered_until_it_is_back(stack: RunningStack) -> None:
    kill(stack, "local-decode")
    assert eventually(lambda: stack.http.get("/ready").status_code == 503, 5)
    refused = stack.complete(some_ids(300), TOKENS, hint=None)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_decode_node"
    assert "retry-after" in refused.headers
    restart(stack, "local-decode")
    answer = stack.complete(some_ids(300), TOKENS, hint="remote")
    assert answer.status_code == 200, answer.text
    stack.await_idle()


def test_a_gateway_that_is_killed_is_rejoined_by_its_nodes(stack: RunningStack, model: Path) -> None:
    kill(stack, "gateway")
    stack.stack.start_gateway()
    stack.await_idle(20)
    prompt = some_ids(300)
    answer = stack.complete(prompt, TOKENS, hint="remote")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prfaas-route"] == "remote:east"
    assert answer.json()["choices"][0]["token_ids"] == PlainModel(model).speak(prompt, TOKENS).token_ids


def restart(stack: RunningStack, name: str) -> None:
    spec = next(each for each in stack.stack.spec.nodes if each.name == name)
    stack.stack.start_node(spec)
    assert eventually(lambda: stack.stack.processes[name].says(f"{name} ready"), 60)
