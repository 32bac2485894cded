"""Several answers to one prompt, as OpenAI's clients get them: prefilled once, told apart by their index."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvcache.control import AnswerEnded, Delta, GenerateJob, PrefillJob
from kvcache.wire import Role
from tests.gateway.conftest import Open
from tests.gateway.fakes import ANSWER, FakeNode, delta, finish, never, receive_kv

TEXT = "t0 t1 t2 "


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_a_prompt_with_several_answers_is_prefilled_and_transferred_once(stage: Open) -> None:
    s = await stage()
    prefill, decode = await s.pair("east")
    answer = (await s.complete(50, n=3, seed=5)).json()
    assert [(one["index"], one["text"], one["finish_reason"]) for one in answer["choices"]] == [
        (index, TEXT, "stop") for index in range(3)
    ]
    assert answer["usage"]["completion_tokens"] == 3 * len(ANSWER)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 3 * len(ANSWER)
    assert len(prefill.jobs(PrefillJob)) == len(decode.jobs(GenerateJob)) == 1
    assert decode.jobs(GenerateJob)[0].answers == 3
    assert not prefill.violations + decode.violations


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_tells_answers_apart_ends_each_once_and_counts_them_all(stage: Open, chat: bool) -> None:
    s = await stage()
    await s.pair()
    body: dict[str, Any] = {"model": "tiny", "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "ab"}
    answer = await s.client.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    found = events(answer.text)
    for index in range(2):
        mine = [one for event in found for one in event["choices"] if one["index"] == index]
        said = "".join(one["delta"].get("content", "") if chat else one["text"] for one in mine)
        assert said == TEXT
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["stop"]
        assert not chat or mine[0]["delta"]["role"] == "assistant"
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 2 * len(ANSWER)
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_each_answer_takes_a_place_on_its_node_and_gives_it_back(stage: Open) -> None:
    s = await stage()
    decode = await s.node("d", Role.DECODE, on_generate=never)
    session = s.gateway.registry.node("d")
    assert session is not None
    asking = asyncio.create_task(s.complete(n=3))
    await s.until(lambda: len(session.jobs) == 3)
    asking.cancel()
    await s.until(lambda: not session.jobs and decode.cancelled)
    assert len(decode.cancelled) == 1


async def test_answers_end_on_their_own_and_the_first_to_fail_ends_all(stage: Open) -> None:
    async def half(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        await node.send(Delta(job.generation, "short", (300,), None, 1))
        await node.send(AnswerEnded(job.generation, 1, "stop", "STOP"))
        await node.send(delta(job, 301, "long"))
        await node.send(Delta(job.generation, "late", (300,), None, 1))

    s = await stage()
    await s.node("d", Role.DECODE, on_generate=half)
    answer = await s.complete(n=2, stream=True)
    found = events(answer.text)
    ended = [one for event in found for one in event.get("choices", ()) if one["finish_reason"]]
    assert [(one["index"], one["finish_reason"], one["stop_reason"]) for one in ended] == [(1, "stop", "STOP")]
    assert found[-1]["error"]["code"] == "protocol"
    assert "[DONE]" not in answer.text


async def test_a_finish_before_every_answer_has_ended_is_no_answer(stage: Open) -> None:
    async def too_soon(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        await node.send(AnswerEnded(job.generation, 0, "stop"))
        await finish(node, job, tokens=0)

    s = await stage(request_timeout_s=5.0)
    await s.node("d", Role.DECODE, on_generate=too_soon)
    answer = await s.complete(n=2)
    assert answer.status_code == 503, answer.text


async def test_more_answers_than_a_node_gives_and_nodes_that_know_none_are_refused(stage: Open) -> None:
    s = await stage()
    decode = await s.node("d", Role.DECODE)
    assert decode.join.max_answers == 8
    refused = (await s.complete(n=9)).json()["error"]
    assert (refused["param"], "at most 8" in refused["message"]) == ("n", True)
    await s.node("older", Role.DECODE, max_answers=0)
    for body, param in (({"n": 2}, "n"), ({"min_p": 0.1}, "min_p"), ({"logit_bias": {"5": 1}}, "logit_bias")):
        refused = (await s.complete(**body)).json()["error"]
        assert (refused["param"], refused["code"]) == (param, "unsupported_parameter")
    assert (await s.complete()).status_code == 200


async def test_how_to_sample_reaches_the_node(stage: Open) -> None:
    s = await stage()
    decode = await s.node("d", Role.DECODE)
    asked = {"min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    assert (await s.complete(**asked, logit_bias={"7": -100, "300": 5})).status_code == 200
    sampling = decode.jobs(GenerateJob)[0].sampling
    assert {field: getattr(sampling, field) for field in asked} == asked
    assert sampling.logit_bias == ((7, -100.0), (300, 5.0))
