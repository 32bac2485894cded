"""Answers of our own nodes on the wire: clients that do not read, leave, pipeline, or speak an older HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway import attempts, life
from gateway.openai.responses import Answer
from kvcache.control import GenerateJob
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, delta, finish, never

PATH = "/v1/completions"


def asking(prompt: str = "ab", version: str = "1.1", path: str = PATH, extra: str = "", **fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1000} | fields).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\n{extra}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connected(one: Stage, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]), **options)


def flooding(pieces: int, chars: int) -> Any:
    async def flood(node: FakeNode, job: GenerateJob) -> None:
        for number in range(pieces):
            await node.send(delta(job, 300, "x" * chars))
            if not number:
                await asyncio.sleep(0.05)
        await finish(node, job, tokens=pieces)

    return flood


async def test_what_a_client_does_not_read_waits_within_bounds_and_comes_in_order(stage: Open) -> None:
    one = await stage()
    written: list[int] = []

    async def count(node: FakeNode, job: GenerateJob) -> None:
        for number in range(900):
            await node.send(delta(job, 300, f"{number}:" + "x" * 8000))
            written.append(number)
        await finish(node, job, tokens=900)

    await one.node("d", Role.DECODE, on_generate=count)
    reader, writer = await connected(one, limit=1024)
    writer.write(asking(stream=True))
    await one.until(lambda: len(written) == 900)
    await asyncio.sleep(0.2)
    transports = [each.transport for each in one.server.server_state.connections]  # type: ignore[union-attr]
    assert 0 < max(each.get_write_buffer_size() for each in transports) < 1 << 20, "the rest waits as it was said"
    text = b""
    async with asyncio.timeout(20):
        while b"[DONE]" not in text[-64:]:
            text += await reader.read(1 << 16)
    writer.close()
    events = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: {")]
    said = [event["choices"][0]["text"].partition(":")[0] for event in events[:-1]]
    assert said == [str(number) for number in range(900)]


async def test_a_client_for_whom_too_much_waits_reads_what_there_is_and_why_it_ended(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MAX_UNREAD_DELTAS", 100)
    one = await stage()
    node = await one.node("d", Role.DECODE, on_generate=flooding(2000, 8000))
    reader, writer = await connected(one, limit=1024)
    writer.write(asking(stream=True, max_tokens=2000))
    await one.until(lambda: node.cancelled)
    text = b""
    async with asyncio.timeout(20):
        while not text.endswith(b"0\r\n\r\n"):
            text += await reader.read(1 << 16)
    writer.close()
    assert text.count(b'"text":"xxx') > 100
    assert b'"code":"slow_client"' in text[-400:]
    assert b"[DONE]" not in text


async def test_an_answer_that_is_not_read_ends_with_its_deadline_and_its_connection(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "READ_GRACE_S", 0.2)
    one = await stage(request_timeout_s=1.0)
    await one.node("d", Role.DECODE, on_generate=flooding(900, 8192))
    reader, writer = await connected(one, limit=1024)
    writer.write(asking(stream=True, extra="x-request-id: stuck\r\n"))
    await asyncio.sleep(0.5)
    assert one.gateway.generation.in_flight.count == 1
    await one.until(lambda: one.gateway.generation.in_flight.count == 0)
    assert (await one.decision("stuck"))["outcome"] == "slow_client"
    assert not (await reader.read()).endswith(b"0\r\n\r\n"), "it sees that this was not all"
    writer.close()


async def test_a_node_that_falls_silent_in_a_stream_is_an_error_event_at_the_deadline(stage: Open) -> None:
    one = await stage(request_timeout_s=0.6)

    async def one_word(node: FakeNode, job: GenerateJob) -> None:
        await node.send(delta(job, 300, "word"))
        await never(node, job)

    node = await one.node("d", Role.DECODE, on_generate=one_word)
    reader, writer = await connected(one)
    writer.write(asking(stream=True))
    text = await reader.readuntil(b"0\r\n\r\n")
    assert b'"text":"word"' in text
    assert b'"code":"request_timeout"' in text
    await one.until(lambda: node.cancelled)
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b'{"status":"live"}'), "the connection is as good as new"
    writer.close()


async def test_a_node_lost_in_a_stream_is_an_error_event_and_the_connection_goes_on(stage: Open) -> None:
    one = await stage()

    async def one_word(node: FakeNode, job: GenerateJob) -> None:
        await node.send(delta(job, 300, "word"))
        node.abort()

    await one.node("d", Role.DECODE, on_generate=one_word)
    reader, writer = await connected(one)
    writer.write(asking(stream=True))
    text = await reader.readuntil(b"0\r\n\r\n")
    assert b'"text":"word"' in text
    assert b'"code":"node_lost"' in text
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b'{"status":"live"}')
    writer.close()


async def test_an_answer_that_cannot_be_told_does_no_harm_to_its_node(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await stage()

    async def two_words(node: FakeNode, job: GenerateJob) -> None:
        for word in ("one ", "two "):
            await node.send(delta(job, 300, word))
            await asyncio.sleep(0.05)
        await never(node, job)

    node = await one.node("d", Role.DECODE, on_generate=two_words)
    told = Answer.chunk

    def chunk(self: Answer, part: Any) -> bytes:
        if part.text == "two ":
            raise RuntimeError
        return told(self, part)

    monkeypatch.setattr(Answer, "chunk", chunk)
    reader, writer = await connected(one)
    writer.write(asking(stream=True))
    text = await reader.readuntil(b"0\r\n\r\n")
    assert b'"code":"internal_error"' in text
    await one.until(lambda: node.cancelled)
    session = one.gateway.registry.node("d")
    assert session is not None
    assert session.accepting
    writer.close()


async def test_requests_on_one_connection_are_answered_in_order(stage: Open) -> None:
    one = await stage()

    async def echo(node: FakeNode, job: GenerateJob) -> None:
        await asyncio.sleep(0.1 if len(job.token_ids) > 10 else 0)
        await node.send(delta(job, 300, f"tokens={len(job.token_ids)}"))
        await finish(node, job, tokens=1)

    await one.node("d", Role.DECODE, on_generate=echo)
    reader, writer = await connected(one)
    live = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = asking("a", stream=True, extra="connection: close\r\n")
    writer.write(asking("ab " * 10, stream=True) + live + asking("ab ab ab") + last)
    answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 200 ") == 4
    counts = [int(part.partition(b'"')[0]) for part in answer.split(b"tokens=")[1:]]
    assert counts[0] > 10 > counts[1] > counts[2]
    assert answer.index(b"[DONE]") < answer.index(b'{"status":"live"}') < answer.index(b"tokens=%d" % counts[1])


async def test_a_client_that_leaves_with_requests_behind_the_first_leaves_nothing(stage: Open) -> None:
    one = await stage()

    async def drip(node: FakeNode, job: GenerateJob) -> None:
        while True:
            await node.send(delta(job, 300, "x"))
            await asyncio.sleep(0.02)

    node = await one.node("d", Role.DECODE, on_generate=drip)
    reader, writer = await connected(one)
    writer.write(asking(stream=True) + asking(stream=True))
    await reader.readuntil(b'"text":"x"')
    writer.transport.abort()
    await one.until(lambda: node.cancelled)
    await one.until(lambda: one.gateway.generation.in_flight.count == 0)
    assert len(node.jobs(GenerateJob)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_reads_until_the_connection_ends(stage: Open, stream: bool) -> None:
    one = await stage()
    await one.node("d", Role.DECODE)
    reader, writer = await connected(one)
    writer.write(asking(version="1.0", stream=stream))
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"]


@pytest.mark.parametrize(
    "request_",
    [
        asking(path="/v1/%63ompletions?x=1"),
        asking(path="http://localhost/v1/completions"),
    ],
)
async def test_a_request_is_known_by_whatever_name_its_path_has(stage: Open, request_: bytes) -> None:
    one = await stage()
    await one.node("d", Role.DECODE)
    reader, writer = await connected(one)
    writer.write(request_)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
async def test_what_is_no_post_is_told_so(stage: Open, method: str) -> None:
    one = await stage()
    answer = await one.client.request(method, PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")
    assert (answer.content == b"") == (method == "HEAD")


@pytest.mark.parametrize("extra", ["", "expect: 100-continue\r\n"])
async def test_who_does_not_read_whole_answers_gets_no_more_of_them(stage: Open, extra: str) -> None:
    one = await stage()
    node = await one.node("d", Role.DECODE, on_generate=flooding(500, 8000))
    _, writer = await connected(one, limit=1024)
    writer.write(asking(extra=extra) * 6)
    await one.until(lambda: node.jobs(GenerateJob))
    await asyncio.sleep(1)
    assert len(node.jobs(GenerateJob)) < 4
    writer.transport.abort()
    await one.until(lambda: not one.gateway.generation.in_flight.count)
