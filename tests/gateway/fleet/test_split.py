"""Requests to split engines, in each dialect: the answer is what one engine alone would have given."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.clusters import Dial
from gateway.terms import ClusterTerms
from tests.gateway.fleet.conftest import DIALECTS, LONG, Pair

ALL = sorted(DIALECTS)
VLLM = [name for name in ALL if name.startswith("vllm")]


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize("dialect", ALL)
async def test_a_split_answer_is_what_one_engine_alone_says(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.p.cached = 7
    split, alone = await one.ask(), await one.alone()
    assert split.status_code == 200
    assert comparable(split.json()) == comparable(alone.json())
    assert split.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    assert split.headers["x-prfaas-route"] == "remote:east"
    assert split.headers["x-prfaas-prefill"] == "node"
    assert (len(one.p.calls), len(one.d.calls)) == (1, 1)


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("tells", [True, False])
async def test_a_streamed_split_answer_is_what_one_engine_alone_says(pairs: Pair, dialect: str, tells: bool) -> None:
    one = await pairs(dialect)
    one.p.cached = 7
    options = {"stream": True} | ({"stream_options": {"include_usage": True}} if tells else {})
    split, alone = await one.ask(**options), await one.alone(**options)
    assert events(split.text) == events(alone.text)
    record = await one.stage.decision(split.headers["x-request-id"])
    assert record["usage"] == {"prompt_tokens": 60, "completion_tokens": 4, "cached_tokens": 7}
    assert (record["outcome"], record["finish"], record["route"]) == ("finished", "length", "remote:east")
    assert record["attempts"][0]["dialect"] == dialect


def events(text: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else comparable(json.loads(one)) for one in found]


@pytest.mark.parametrize("dialect", ALL)
async def test_a_chat_with_tools_a_format_and_fields_nobody_knows_reaches_both_engines(
    pairs: Pair, dialect: str
) -> None:
    one = await pairs(dialect)
    extra = {
        "messages": [{"role": "user", "content": "ab " * 60}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
        "response_format": {"type": "json_object"},
        "some_new_field": {"deep": [1, 2]},
        "max_completion_tokens": 3,
    }
    path = "/v1/chat/completions"
    split, alone = await one.ask(path, **extra), await one.alone(path, **extra)
    assert comparable(split.json()) == comparable(alone.json())
    for call in (*one.p.calls, *one.d.calls):
        assert {name: call.body[name] for name in extra if name != "max_completion_tokens"} == {
            name: value for name, value in extra.items() if name != "max_completion_tokens"
        }
    assert one.d.calls[0].body["max_completion_tokens"] == 3


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_batches_and_samples_come_back_as_one_answer(pairs: Pair, dialect: str, stream: bool) -> None:
    one = await pairs(dialect)
    one.p.cached = 5
    body = {"prompt": [LONG, LONG[:40]], "n": 2, "stream": stream, "seed": 1}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    split, alone = await one.ask(**body), await one.alone(**body)
    if stream:
        assert sorted(map(repr, events(split.text)[:-2])) == sorted(map(repr, events(alone.text)[:-2]))
        usages = events(split.text)[-2]["usage"], events(alone.text)[-2]["usage"]
    else:
        assert split.json()["choices"] == alone.json()["choices"]
        usages = split.json()["usage"], alone.json()["usage"]
    counts = [{name: usage[name] for name in usage if name != "prompt_tokens_details"} for usage in usages]
    assert counts[0] == counts[1]
    seeds = sorted(call.body["seed"] for call in one.d.calls)
    assert seeds == ([1, 2] if dialect == "sglang" else [1, 1, 2, 2])


@pytest.mark.parametrize("dialect", ALL)
async def test_a_short_prompt_stays_where_a_decode_engine_can_prefill(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    answer = await one.ask(prompt=LONG[:10])
    assert answer.status_code == 200
    stayed = answer.headers["x-prfaas-route"] == "local"
    assert stayed == one.stays_whole
    assert len(one.p.calls) == (0 if stayed else 1)
    reason = answer.headers["x-prfaas-route-reason"]
    assert reason == ("no_local_prefill_node" if stayed else "no_way_at_home")


@pytest.mark.parametrize("dialect", VLLM)
async def test_prompt_logprobs_keep_a_request_whole(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    answer = await one.ask(echo=True, logprobs=1)
    assert answer.headers["x-prfaas-route-reason"] == "whole_request"
    assert (len(one.p.calls), len(one.d.calls)) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_of_sglang_are_joined_from_both_sides(pairs: Pair, stream: bool) -> None:
    one = await pairs("sglang")
    answer = await one.ask(echo=True, logprobs=1, stream=stream)
    if stream:
        parts = [event["choices"][0]["logprobs"]["tokens"] for event in events(answer.text)[:-2]]
        tokens = [token for part in parts for token in part]
    else:
        tokens = answer.json()["choices"][0]["logprobs"]["tokens"]
    assert tokens == [*map(str, LONG), "60 ", "61 ", "62 ", "63 "]


@pytest.mark.parametrize("dialect", ALL)
async def test_an_answer_that_ends_with_its_first_token_comes_at_once(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    prompt = "ab " * 60 + "EOS"
    split, alone = await one.ask(prompt=prompt), await one.alone(prompt=prompt)
    assert split.json()["choices"] == alone.json()["choices"]
    assert split.headers["x-prfaas-route"] == "remote:east"


@pytest.mark.parametrize("dialect", ["vllm-mooncake", "sglang"])
async def test_a_rank_is_named_to_both_sides(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect, ranks=2)
    if dialect == "vllm-mooncake":
        one.d.known = [one.p.engine_id(0), one.p.engine_id(1)]
    for _ in range(3):
        assert (await one.ask()).status_code == 200
    for p, d in zip(one.p.calls, one.d.calls, strict=True):
        if dialect == "sglang":
            assert d.body["disagg_prefill_dp_rank"] == p.body["routed_dp_rank"]
        else:
            rank = int(p.headers["x-data-parallel-rank"])
            assert d.body["kv_transfer_params"]["remote_engine_id"] == one.p.engine_id(rank)
            assert d.headers["x-data-parallel-rank"] in ("0", "1")


@pytest.mark.parametrize("field", ["kv_transfer_params", "bootstrap_host", "disagg_prefill_dp_rank"])
async def test_a_client_cannot_say_where_kv_is(pairs: Pair, field: str) -> None:
    one = await pairs("sglang")
    answer = await one.ask(**{field: {"remote_host": "10.0.0.1"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not one.p.calls


@pytest.mark.parametrize("stream", [1, 0, "yes", []])
async def test_what_engines_may_take_for_a_stream_is_refused(pairs: Pair, stream: Any) -> None:
    one = await pairs("vllm-nixl-pull")
    answer = await one.ask(stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    assert not one.p.calls


async def test_a_cluster_that_is_drained_or_may_not_serve_the_model_gets_no_prompt(pairs: Pair) -> None:
    one = await pairs("vllm-nixl-pull")
    registry = one.stage.gateway.registry
    registry.register("east", Dial.IN, 0.0, ClusterTerms(models=("another",)))
    assert (await one.ask()).headers["x-prfaas-route"] == "local"
    registry.set_terms("east", ClusterTerms(models=("tiny",)))
    assert (await one.ask()).headers["x-prfaas-route"] == "remote:east"
    registry.set_draining("east", True)
    assert (await one.ask()).headers["x-prfaas-route"] == "local"


async def test_status_and_explain_speak_of_engines(pairs: Pair) -> None:
    one = await pairs("vllm-nixl-pull")
    answer = await one.ask(stream=True)

    async def prfaas(*arguments: str) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--gateway", one.stage.url])
        assert done.exit_code == 0, done.output
        return done.output

    rows = [line.split() for line in (await prfaas("status")).splitlines()]
    assert ["p0", "east", "tiny", "vllm-nixl-pull", "prefill", "accepting", "0/256", "0"] in [row[:8] for row in rows]
    said = await prfaas("explain", answer.headers["x-request-id"])
    assert "east: more uncached tokens than the threshold" in said
    assert "outcome finished" in said
