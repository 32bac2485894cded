"""What a stranger's client and an operator's terminal see of a running stack."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.models import tiny_model
from tests.stacks import RunningStack, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = ROOT / "deploy" / "chat.jinja"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    directory = tiny_model("gemma3_text", tmp_path_factory.mktemp("model") / "gemma3_text")
    options = ("--chat-template", str(TEMPLATE), "--remote-slack", "60")
    with running_stack(directory, tmp_path_factory.mktemp("logs"), gateway_options=options, threshold=100) as stack:
        yield stack


@pytest.fixture
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.stack.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_the_openai_package_lists_models_and_completes(stack: RunningStack, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [stack.model]
    answer = client.completions.create(model=stack.model, prompt="some words", max_tokens=5, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 5
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_answer_says_the_same_as_a_whole_one(stack: RunningStack, client: openai.OpenAI) -> None:
    asked = {"model": stack.model, "prompt": "some words " * 30, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    first, second = whole.usage, parts[-1].usage
    assert (second.prompt_tokens, second.completion_tokens) == (first.prompt_tokens, first.completion_tokens)
    assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_ends_with_its_usage(stack: RunningStack, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "say something"}]
    parts = list(
        client.chat.completions.create(
            model=stack.model,
            messages=messages,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-2].choices[0].finish_reason in ("stop", "length")
    assert parts[-1].usage is not None


def test_a_wrong_model_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x", max_tokens=1)


def test_a_long_prompt_goes_away_and_a_short_one_stays(stack: RunningStack) -> None:
    routes = [stack.complete(some_ids(length), 1, hint=None).headers["x-prfaas-route"] for length in (20, 400)]
    assert routes == ["local", "remote:east"]


def test_status_as_json_names_every_node(stack: RunningStack) -> None:
    run = "from gateway.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", run, "status", "--json", "--gateway", stack.stack.url],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert all(node.name in json.dumps(status) for node in stack.stack.spec.nodes)


def test_a_client_that_leaves_before_the_first_token_frees_everything(stack: RunningStack) -> None:
    body = stack.body(some_ids(8000), 4, stream=True)
    headers = {"x-prfaas-route-hint": "remote", "x-request-id": "leaves-early"}
    with (
        httpx.Client(base_url=stack.stack.url, timeout=0.15) as hasty,
        pytest.raises(httpx.ReadTimeout),
        hasty.stream("POST", "/v1/completions", json=body, headers=headers),
    ):
        pass
    began = time.monotonic()
    stack.await_idle(5.0)
    assert time.monotonic() - began < 5.0
