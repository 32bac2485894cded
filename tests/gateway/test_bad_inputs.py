"""What clients get wrong: every refusal is an OpenAI error object that names the field."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.model import ServedModel
from gateway.openai.requests import MAX_PROMPT_IDS, decode_json, parse_chat, parse_completion
from gateway.state import State
from tests.calm import calm
from tests.gateway.direct import DirectTransport
from tests.models import CONTEXT, VOCAB

BASE = {"model": "tiny", "prompt": "ab"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def client(config: GatewayConfig, model: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    gateway = Gateway(replace(config, max_body_bytes=50_000), model, State(None))
    transport = DirectTransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    gateway.close()


@pytest.fixture
async def roomy(config: GatewayConfig, model: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that reads large bodies."""
    gateway = Gateway(config, model, State(None))
    transport = DirectTransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    gateway.close()


COMPLETION_CASES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [1, VOCAB]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
    ({"prompt": [5] * (CONTEXT - 10), "max_tokens": 11}, "max_tokens"),
    ({"model": 3}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 1 << 63}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"n": 0}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05"),
    ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
    ({"logit_bias": {str(VOCAB): 1}}, f"logit_bias.{VOCAB}"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": "1"}, "repetition_penalty"),
    ({"min_tokens": 1}, "min_tokens"),
    ({"min_p": 1.1}, "min_p"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"guided_json": {}}, "guided_json"),
]

CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "ab " * CONTEXT}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
]


@pytest.mark.parametrize(("change", "param"), COMPLETION_CASES, ids=lambda v: str(v)[:40])
async def test_a_bad_completion_names_its_field(client: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    await refused(client, "/v1/completions", BASE | change, param)


@pytest.mark.parametrize(("change", "param"), CHAT_CASES, ids=lambda v: str(v)[:40])
async def test_a_bad_chat_names_its_field(client: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    await refused(client, "/v1/chat/completions", CHAT | change, param)


@pytest.mark.parametrize("field", ["model", "prompt"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, field: str) -> None:
    await refused(client, "/v1/completions", {k: v for k, v in BASE.items() if k != field}, field)


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b"null", b"[" * 10_000, b'{"model": NaN}'])
async def test_a_body_that_is_no_json_object_is_refused(client: httpx.AsyncClient, data: bytes) -> None:
    answer = await client.post("/v1/completions", content=data)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("end", [b"]}", b"]"])
def test_a_body_of_brackets_is_not_collected_over_while_it_is_read(end: bytes) -> None:
    passes = []
    gc.callbacks.append(lambda phase, _: passes.append(phase))
    try:
        status_of(decode_json, b'{"x":[' + b",".join([b"[]"] * 100_000) + end)
    finally:
        gc.callbacks.pop()
    assert len(passes) < 10
    assert gc.isenabled()


async def test_fields_that_do_not_change_the_answer_are_ignored(client: httpx.AsyncClient) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": 1},
        "store": False,
        "service_tier": "auto",
        "something_new": 5,
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "tools": [],
        "response_format": {"type": "text"},
    }
    answer = await client.post("/v1/completions", json=BASE | harmless)
    assert answer.json()["error"]["code"] == "no_decode_node"


async def test_a_body_over_the_limit_is_413_announced_or_not(client: httpx.AsyncClient) -> None:
    large = b'{"model": "tiny", "prompt": "' + b"a" * 60_000 + b'"}'

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(large), 1000):
            yield large[at : at + 1000]

    for content in (large, parts()):
        answer = await client.post("/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_an_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=BASE | {"model": "gpt-4"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


async def test_get_is_405_and_an_unknown_path_404_in_the_same_form(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/completions")).status_code == 405
    answer = await client.get("/v1/nothing")
    assert (answer.status_code, set(answer.json()["error"])) == (404, {"message", "type", "param", "code"})


@pytest.mark.parametrize("name", ["", "a b", "east\n", "-a", "a" * 64, "\u00e9"])
async def test_a_cluster_whose_name_would_not_be_safe_in_a_header_is_refused(
    client: httpx.AsyncClient, name: str
) -> None:
    answer = await client.post("/v1/clusters", json={"name": name})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")


@pytest.mark.parametrize("limit", ["0", "1001", "many", "1.5"])
async def test_a_bad_query_is_refused_in_the_same_form(client: httpx.AsyncClient, limit: str) -> None:
    answer = await client.get("/v1/decisions", params={"limit": limit})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "limit", "invalid_request_error")
    assert "limit" in error["message"]


async def test_what_breaks_inside_is_answered_in_the_same_form(
    config: GatewayConfig, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(config, model, State(None))
    monkeypatch.setattr(gateway.decisions, "find", lambda name: 1 / 0)
    transport = DirectTransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/v1/decisions/some")
    gateway.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


async def test_an_unsafe_request_id_is_replaced_and_a_good_one_kept(client: httpx.AsyncClient) -> None:
    good = await client.post("/v1/completions", json=BASE, headers={"x-request-id": "a-B.9_:x"})
    assert good.headers["x-request-id"] == "a-B.9_:x"
    for bad in ("with space", "x" * 129, 'quote"', ""):
        answer = await client.post("/v1/completions", json=BASE, headers={"x-request-id": bad})
        assert answer.headers["x-request-id"] != bad
        assert len(answer.headers["x-request-id"]) == 24


async def test_without_a_chat_template_chat_is_refused_with_the_cure(config: GatewayConfig, model: ServedModel) -> None:
    gateway = Gateway(config, replace(model, template=None), State(None))
    transport = DirectTransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    gateway.close()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "no_chat_template")
    assert "--chat-template" in error["message"]


@pytest.mark.parametrize("body", [{"prompt": "ab"}, {"messages": CHAT["messages"]}, {"prompt": ""}])
async def test_tokenize_and_detokenize_undo_each_other(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    found = (await client.post("/tokenize", json=body)).json()
    assert found["count"] == len(found["tokens"])
    text = (await client.post("/detokenize", json={"tokens": found["tokens"]})).json()["prompt"]
    assert text == {"ab": "<bos>ab", "": "<bos>"}.get(body.get("prompt", "-"), "<bos>[user]hi>")


async def test_tokenize_needs_exactly_one_input_and_detokenize_known_ids_and_not_too_many(
    client: httpx.AsyncClient, roomy: httpx.AsyncClient
) -> None:
    for body in ({}, {"prompt": "a", "messages": CHAT["messages"]}):
        assert (await client.post("/tokenize", json=body)).json()["error"]["param"] == "prompt"
    for tokens, param in (([1, VOCAB], "tokens[1]"), ([1] * (MAX_PROMPT_IDS + 1), "tokens")):
        answer = await roomy.post("/detokenize", json={"tokens": tokens})
        assert answer.json()["error"]["param"] == param


def status_of(parse: Callable[[bytes], Any], data: bytes) -> int:
    try:
        parse(data)
    except ApiError as error:
        return error.status
    return 200


words = st.text("ab\x00\u00e9\U0001f600", max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "stop",
        "n",
        "logprobs",
        "logit_bias",
        "min_p",
        "stream",
        "stream_options",
        "max_tokens",
        "seed",
        "tools",
    ]
)


@calm
@given(st.dictionaries(names, json_values))
def test_any_json_is_parsed_or_refused_with_400(body: dict[str, Any]) -> None:
    data = msgspec.json.encode(body)
    for parse, whole in ((parse_completion, BASE), (parse_chat, CHAT)):
        for candidate in (data, msgspec.json.encode(whole | body)):
            assert status_of(parse, candidate) in (200, 400)
