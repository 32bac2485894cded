"""What a stranger's client and an operator's terminal see of a running stack."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deploy.stack import QUICKSTART_NODES
from tests.collector import Collector, collecting
from tests.models import tiny_model
from tests.stacks import RunningStack, eventually, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = ROOT / "deploy" / "chat.jinja"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[RunningStack]:
    directory = tiny_model("gemma3_text", tmp_path_factory.mktemp("model") / "gemma3_text")
    seen = ("--otlp-endpoint", collector.url, "--log-format", "json")
    options = ("--chat-template", str(TEMPLATE), "--remote-slack", "60", *seen)
    nodes = tuple(replace(node, options=seen) for node in QUICKSTART_NODES)
    logs = tmp_path_factory.mktemp("logs")
    with running_stack(directory, logs, gateway_options=options, nodes=nodes, threshold=100) as stack:
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


def test_one_request_is_one_connected_trace_over_gateway_prefill_and_decode_node(
    stack: RunningStack, collector: Collector
) -> None:
    trace, caller = "c" * 32, "d" * 16
    headers = {"x-prfaas-route-hint": "remote", "traceparent": f"00-{trace}-{caller}-01"}
    answer = stack.http.post("/v1/completions", json=stack.body(some_ids(300, seed=5), 3), headers=headers)
    assert answer.headers["x-prfaas-route"] == "remote:east"
    assert eventually(lambda: {"POST /v1/completions", "prefill", "generate"} <= _names(collector, trace), 10)
    spans = {span.name: span for span in collector.trace(trace)}
    root, attempt, prefill, generate = (spans[n] for n in ("POST /v1/completions", "attempt", "prefill", "generate"))
    assert (root.parent, attempt.parent, prefill.parent, generate.parent) == (caller, root.span, *[attempt.span] * 2)
    assert {spans[name].parent for name in ("parse", "tokenize", "route")} == {root.span}
    assert {spans[name].parent for name in ("queue", "compute", "transfer")} == {prefill.span}
    assert {spans[name].parent for name in ("fetch", "speak")} == {generate.span}
    assert (root.service, prefill.instance, generate.instance) == ("prfaas-gateway", "east-prefill", "local-decode")
    assert all(root.begin <= span.begin <= span.end for span in spans.values())
    assert spans["compute"].begin <= spans["transfer"].end
    assert spans["transfer"].begin <= spans["fetch"].end <= generate.end  # its sender hears of the end a little later
    assert "first_token" in root.events
    assert "first_token" in generate.events
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert attempt.attributes["prfaas.wire_bytes"] > 0
    assert not collector.faults


def _names(collector: Collector, trace: str) -> set[str]:
    return {span.name for span in collector.trace(trace)}


def test_nothing_of_a_prompt_or_an_answer_is_traced_or_logged(stack: RunningStack, collector: Collector) -> None:
    name = "e" * 32
    words = "unmistakable words of mine " * 20
    answer = stack.http.post(
        "/v1/completions", json=stack.body(words, 8), headers={"traceparent": f"00-{name}-{'d' * 16}-01"}
    )
    assert eventually(lambda: "generate" in _names(collector, name), 10)
    said = [words.split()[0], answer.json()["choices"][0]["text"].strip()]
    logs = b"".join(process.log.read_bytes() for process in stack.stack.processes.values())
    for text in filter(None, said):
        assert text.encode() not in collector.raw
        assert json.dumps(text, ensure_ascii=False)[1:-1].encode() not in logs


def test_a_request_is_found_in_every_process_log_by_its_id(stack: RunningStack) -> None:
    answer = stack.complete(some_ids(300, seed=6), 2)
    internal = stack.record(answer)["id"]

    def lines(process: str) -> list[dict[str, object]]:
        text = stack.stack.processes[process].log.read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    assert eventually(lambda: any(line.get("request") == internal for line in lines("east-prefill")), 5)
    assert eventually(lambda: any(line.get("request") == internal for line in lines("local-decode")), 5)
    mine = [line for line in lines("gateway") if line.get("client_id") == answer.headers["x-request-id"]]
    assert any(line.get("request") == internal for line in mine)


@pytest.mark.parametrize("chat", [False, True])
def test_a_split_request_counts_and_weighs_tokens_as_one_engine_alone_does(stack: RunningStack, chat: bool) -> None:
    path, asked = "/v1/completions", stack.body(some_ids(300, seed=21 + chat), 6, logprobs=2)
    if chat:
        path, messages = "/v1/chat/completions", [{"role": "user", "content": "a question of some length " * 40}]
        asked = {"model": stack.model, "messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
        asked |= {"top_logprobs": 2, "ignore_eos": True}
    found = []
    for hint in ("remote", "local"):
        answer = stack.http.post(path, json=asked, headers={"x-prfaas-route-hint": hint})
        assert answer.headers["x-prfaas-route"] == {"remote": "remote:east", "local": "local"}[hint]
        found.append(answer.json())
    split, whole = found
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert split["usage"][field] == whole["usage"][field]
    assert split["usage"]["completion_tokens"] == 6
    assert split["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    first, second = (_logprobs(one, chat) for one in found)
    assert [token for token, _ in first] == [token for token, _ in second]
    assert [value for _, value in first] == pytest.approx([value for _, value in second], abs=1e-3)


def _logprobs(answer: dict[str, Any], chat: bool) -> list[tuple[str, float]]:
    """Each token of an answer with its log-probability, and behind it the likeliest with theirs."""
    told = answer["choices"][0]["logprobs"]
    if chat:
        entries = [(one, *one["top_logprobs"]) for one in told["content"]]
        return [(one["token"], one["logprob"]) for entry in entries for one in entry]
    chosen = zip(told["tokens"], told["token_logprobs"], strict=True)
    return [*chosen, *((token, value) for top in told["top_logprobs"] for token, value in sorted(top.items()))]


def test_several_answers_to_one_prompt_come_from_one_transfer(stack: RunningStack, client: openai.OpenAI) -> None:
    asked = {"model": stack.model, "prompt": "a prompt of its own " * 60, "max_tokens": 6, "temperature": 1.0}
    answer = client.completions.with_raw_response.create(**asked, n=3, seed=11, extra_body={"ignore_eos": True})
    choices = answer.parse().choices
    assert len({choice.text for choice in choices}) == 3
    assert answer.parse().usage.completion_tokens == 18
    attempts = stack.http.get(f"/v1/decisions/{answer.headers['x-request-id']}").json()["attempts"]
    assert len(attempts) == 1
    second = client.completions.create(**asked, seed=12, extra_body={"ignore_eos": True})
    assert second.choices[0].text == choices[1].text


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
