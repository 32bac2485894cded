"""The openai package, unchanged, against the gateway."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from gateway.config import FallbackPolicy
from kvcache.control import Finished, GenerateJob
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, delta, failing, finish, receive_kv

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


def client_of(one: Stage) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{one.url}/v1", api_key="unused", max_retries=0, http_client=httpx.AsyncClient())


async def test_a_completion(stage: Open) -> None:
    one = await stage()
    _, decode = await one.pair()
    async with client_of(one) as client:
        answer = await client.completions.create(
            model="tiny",
            prompt="ab cd",
            max_tokens=5,
            temperature=0.3,
            top_p=0.9,
            seed=7,
            stop=["x", "y"],
            logprobs=2,
            extra_body={"top_k": 4, "ignore_eos": True, "stop_token_ids": [9], "return_token_ids": True},
        )
    [choice] = answer.choices
    assert choice.text == "t0 t1 t2 "
    assert choice.finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.system_fingerprint == one.gateway.generation._s.model.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-0.5] * 3
    assert [len(top) for top in choice.logprobs.top_logprobs or ()] == [2] * 3
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.tokens is not None
    lengths = [len(token) for token in choice.logprobs.tokens]
    assert choice.logprobs.text_offset == [0, lengths[0], lengths[0] + lengths[1]]
    [job] = decode.jobs(GenerateJob)
    sampling = job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.3, 0.9, 4)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (7, ("x", "y"), (9,))
    assert (sampling.ignore_eos, sampling.logprobs) == (True, 2)
    assert choice.model_dump()["token_ids"] == [300, 301, 302]
    assert choice.model_dump()["prompt_token_ids"] == list(job.token_ids)
    assert answer.usage.prompt_tokens == len(job.token_ids)


async def test_a_streamed_completion_with_usage_and_logprobs(stage: Open) -> None:
    one = await stage()
    await one.pair()
    async with client_of(one) as client:
        stream = await client.completions.create(
            model="tiny", prompt="ab", stream=True, logprobs=1, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "t0 t1 t2 "
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])
    offsets = [c.logprobs.text_offset for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    flat = [offset for part in offsets for offset in part or ()]
    assert flat == sorted(set(flat))
    assert len(flat) == 3
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_chat_completion(stage: Open) -> None:
    one = await stage()
    _, decode = await one.pair()
    async with client_of(one) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=CHAT, max_completion_tokens=6, logprobs=True, top_logprobs=2
        )
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "t0 t1 t2 "
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    for entry in content:
        assert bytes(entry.bytes or []).decode() == entry.token
    [job] = decode.jobs(GenerateJob)
    assert job.sampling.max_tokens == 6
    text = one.gateway.generation._s.model.tokenizer.decode(job.token_ids)
    assert text == "[system]be brief[user]hi>"


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(stage: Open) -> None:
    one = await stage()
    await one.pair()
    async with client_of(one) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "t0 t1 t2 "
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[0].object == "chat.completion.chunk"


async def test_a_chat_without_a_limit_may_fill_the_context(stage: Open) -> None:
    one = await stage()
    _, decode = await one.pair()
    async with client_of(one) as client:
        await client.chat.completions.create(model="tiny", messages=CHAT)
    [job] = decode.jobs(GenerateJob)
    assert job.sampling.max_tokens == one.gateway.registry.context_tokens - len(job.token_ids)


async def test_tokens_held_back_without_text_make_no_empty_chunks(stage: Open) -> None:
    one = await stage()

    async def hold_back(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        for text in ("", "", "abc"):
            await node.send(delta(job, 300, text))
        await node.send(Finished(job.generation, "length", len(job.token_ids), 3, 0, None))

    await one.pair(on_generate=hold_back)
    async with client_of(one) as client:
        stream = await client.completions.create(model="tiny", prompt="ab", stream=True)
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks] == ["abc", ""]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_errors_become_the_exceptions_that_clients_catch(stage: Open) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)
    await one.node("d", Role.DECODE, on_generate=failing("decode", "engine_lost"))
    async with client_of(one) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="ab")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=CHAT, n=17)
        assert refused.value.param == "n"
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model="tiny", prompt="ab")
        assert failed.value.status_code == 503


async def test_an_error_in_a_stream_raises_in_the_client(stage: Open) -> None:
    one = await stage()

    async def break_off(node: FakeNode, job: GenerateJob) -> None:
        await node.send(delta(job, 300, "half"))
        await asyncio.sleep(0.05)
        await failing("decode", "engine_lost")(node, job)

    await one.node("d", Role.DECODE, on_generate=break_off)
    async with client_of(one) as client:
        stream = await client.completions.create(model="tiny", prompt="ab", stream=True)
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].text == "half"
        with pytest.raises(openai.APIError, match="engine_lost"):
            await anext(chunks)


async def test_the_model_list(stage: Open) -> None:
    one = await stage()
    async with client_of(one) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_a_stop_text_is_named(stage: Open) -> None:
    one = await stage()

    async def stopped(node: FakeNode, job: GenerateJob) -> None:
        await node.send(delta(job, 300, "a"))
        await node.send(Finished(job.generation, "stop", len(job.token_ids), 1, 0, "END"))

    await one.node("d", Role.DECODE, on_generate=stopped)
    answer = await one.complete(stop="END")
    assert answer.json()["choices"][0]["stop_reason"] == "END"


async def test_a_slow_reader_gets_everything_in_order(stage: Open) -> None:
    one = await stage()

    async def many(node: FakeNode, job: GenerateJob) -> None:
        for n in range(500):
            await node.send(delta(job, 300, f"{n} "))
        await finish(node, job, tokens=500)

    await one.node("d", Role.DECODE, on_generate=many)
    text = ""
    async with client_of(one) as client:
        stream = await client.completions.create(model="tiny", prompt="ab", stream=True, max_tokens=500)
        async for chunk in stream:
            text += chunk.choices[0].text
            if len(text) < 200:
                await asyncio.sleep(0.005)
    assert text == "".join(f"{n} " for n in range(500))
