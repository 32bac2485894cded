"""Where a request's bytes end and the next one's begin, whoever sends them and however they come."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from gateway import front as fronts
from gateway import pace, protocol
from gateway.keys import Role
from tests.gateway.relay.asking import ANSWER, connect, idle, raw, request
from tests.gateway.relay.backend import END, STREAM, Backend, chunk, event, says, whole

BODY = b'{"model": "m", "prompt": "a"}'
START = b"POST /v1/completions HTTP/1.1\r\n"
HIDDEN = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-hidden: 1\r\ncontent-length: 29\r\n\r\n" + BODY
LENGTH = b"content-length: %d\r\n" % len(BODY)
WRONG = {
    "a length and chunks": b"host: localhost\r\n" + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks and a length": b"host: localhost\r\ntransfer-encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": b"host: localhost\r\ncontent-length: 0\r\n" + LENGTH + b"\r\n" + HIDDEN,
    "one length twice": b"host: localhost\r\n" + LENGTH + LENGTH + b"\r\n" + BODY,
    "a length with a sign": b"host: localhost\r\ncontent-length: +29\r\n\r\n" + BODY,
    "a list of lengths": b"host: localhost\r\ncontent-length: 29, 29\r\n\r\n" + BODY,
    "a length in hexadecimal": b"host: localhost\r\ncontent-length: 0x1d\r\n\r\n" + BODY,
    "an endless length": b"host: localhost\r\ncontent-length: " + b"9" * 400 + b"\r\n\r\n" + BODY,
    "a blank before the colon": b"host: localhost\r\ncontent-length : 29\r\n\r\n" + BODY,
    "a folded header": b"host: localhost\r\nx-a: b\r\n transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "a line without CR": b"host: localhost\ncontent-length: 29\r\n\r\n" + BODY,
    "a head that ends without CR": b"host: localhost\r\n" + LENGTH + b"\n" + HIDDEN,
    "a NUL": b"host: localhost\r\nx-a: \0\r\n" + LENGTH + b"\r\n" + BODY,
    "a line without a name": b"host: localhost\r\n: b\r\n" + LENGTH + b"\r\n" + BODY,
    "a coding nobody knows": b"host: localhost\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_could_be_read_in_two_ways_is_no_request_and_hides_none(front: Any, name: str) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    answer = await raw(one, START + WRONG[name])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert engine.seen == []
    await idle(one)


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n", b"accept: a\r\naccept: b\r\n", b"x-a:  b \t\r\n", H2C])
async def test_what_is_only_unusual_is_answered(front: Any, more: bytes) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    answer = await raw(one, START + b"Host: localhost\r\n" + more + b"Content-Length:29\r\n\r\n" + BODY, until=ANSWER)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert engine.seen[0][1] == BODY
    assert b"http2-settings" not in engine.seen[0][0]
    await idle(one)


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
async def test_a_request_is_the_same_however_it_comes(front: Any, pause_s: float) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    reader, writer = await connect(one)
    for cut in (1, 30, 60, len(request()) - 3):
        writer.write(request()[:cut])
        await asyncio.sleep(0.02)
        for byte in request()[cut:]:
            writer.write(bytes([byte]))
            if pause_s:
                await asyncio.sleep(pause_s)
        assert (await asyncio.wait_for(reader.readuntil(ANSWER), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert [body for _, body in engine.seen] == [BODY] * 4
    await idle(one)


async def test_requests_of_one_read_are_answered_one_by_one(front: Any) -> None:
    running = most = 0

    async def say(backend: Backend, *talk: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        talk[1].write(whole(json.loads(talk[3])["prompt"].encode()))

    one, _ = await front(say)
    prompts = [f"p{number}p" for number in range(5)]
    answer = await raw(one, b"".join(request({"prompt": prompt}) for prompt in prompts), until=b"p4p")
    places = [answer.index(prompt.encode()) for prompt in prompts]
    assert places == sorted(places)
    assert most == 1
    await idle(one)


async def test_many_refusals_of_one_read_are_said_one_by_one(front: Any) -> None:
    one, _ = await front(says(whole(ANSWER)))
    one.gateway.keys.create("admin", Role.ADMIN)
    last = request(more="connection: close\r\n")
    answer = await raw(one, request() * 300 + last)
    assert answer.count(b"HTTP/1.1 401 ") == 301


async def test_a_client_that_leaves_with_requests_behind_a_running_one_ends_the_engines_work(front: Any) -> None:
    async def say(backend: Backend, *talk: Any) -> None:
        await talk[0].read()  # until the gateway closes
        backend.gone.set()

    one, (engine,) = await front(say)
    _, writer = await connect(one)
    writer.write(request() + request())
    await one.until(lambda: engine.seen)
    writer.close()
    await asyncio.wait_for(engine.gone.wait(), 5)
    assert len(engine.seen) == 1
    await idle(one)


async def test_what_comes_ahead_of_an_answer_is_bounded(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "MAX_AHEAD_BYTES", 1000)
    go_on = asyncio.Event()

    async def say(backend: Backend, *talk: Any) -> None:
        await go_on.wait()
        talk[1].write(whole(ANSWER))

    one, (engine,) = await front(say)
    reader, writer = await connect(one)
    large = request({"prompt": "x" * (1 << 20)})
    writer.write(request() + large * 16)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 0.3)
    go_on.set()
    for _ in range(17):
        await asyncio.wait_for(reader.readuntil(ANSWER), 5)
    writer.close()
    assert len(engine.seen) == 17
    await idle(one)


@pytest.mark.parametrize("stage_of_it", ["head", "body", "engine", "answer"])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(front: Any, stage_of_it: str) -> None:
    async def say(backend: Backend, *talk: Any) -> None:
        if stage_of_it == "answer":
            talk[1].write(STREAM + chunk(event("a")))
        await talk[0].read()
        backend.gone.set()

    one, (engine,) = await front(say)
    reader, writer = await connect(one)
    sent = {"head": request()[:40], "body": request()[:-5]}.get(stage_of_it, request())
    writer.write(sent)
    if stage_of_it == "answer":
        await reader.readuntil(b"data: ")
    elif stage_of_it == "engine":
        await one.until(lambda: engine.seen)
    else:
        await asyncio.sleep(0.05)
    writer.transport.abort()
    if stage_of_it in ("engine", "answer"):
        await asyncio.wait_for(engine.gone.wait(), 5)
    await one.until(lambda: one.gateway.generation.in_flight.count == 0)
    await idle(one)


async def test_a_client_that_leaves_while_its_request_waits_for_an_engine_leaves_nothing(front: Any) -> None:
    async def say(backend: Backend, *talk: Any) -> None:
        await talk[0].read()
        backend.gone.set()

    one, (engine,) = await front(say, fields={"max_running": 1})
    _, first = await connect(one)
    first.write(request())
    await one.until(lambda: engine.seen)
    _, second = await connect(one)
    second.write(request())
    await one.until(lambda: one.gateway.waiting.view()["waiting"] == 1)
    second.transport.abort()
    await one.until(lambda: one.gateway.waiting.view()["waiting"] == 0)
    first.transport.abort()
    await asyncio.wait_for(engine.gone.wait(), 5)
    assert len(engine.seen) == 1
    await idle(one)


async def test_a_refusal_does_not_wait_for_the_body_and_the_connection_goes_on_behind_it(front: Any) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    _, secret = one.gateway.keys.create("admin", Role.ADMIN)
    reader, writer = await connect(one)
    whole_request = request({"prompt": "x" * 1000})
    writer.write(whole_request[:500])
    assert (await asyncio.wait_for(reader.readuntil(b"invalid_api_key"), 5)).startswith(b"HTTP/1.1 401 ")
    writer.write(whole_request[500:700])
    await asyncio.sleep(0.01)
    writer.write(whole_request[700:] + request(more=f"authorization: Bearer {secret}\r\n"))
    assert b"HTTP/1.1 200 " in await asyncio.wait_for(reader.readuntil(ANSWER), 5)
    writer.close()
    assert [body for _, body in engine.seen] == [BODY]


async def test_the_rest_of_a_refused_body_is_waited_for_but_not_for_long(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    one, _ = await front(says(whole(ANSWER)))
    one.gateway.keys.create("admin", Role.ADMIN)
    answer = await raw(one, request()[:-5])
    assert answer.startswith(b"HTTP/1.1 401 ")


async def test_a_connection_serves_all_kinds_of_requests_one_after_the_other(front: Any) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    reader, writer = await connect(one)
    live = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    for data, end in ((request(), ANSWER), (request({"model": "nobody"}), b"model_not_found"), (live, b'"live"}')):
        writer.write(data)
        await asyncio.wait_for(reader.readuntil(end), 5)
    writer.write(request() + live + request({"model": "nobody"}) + request())
    for end in (ANSWER, b'"live"}', b"model_not_found", ANSWER):
        await asyncio.wait_for(reader.readuntil(end), 5)
    writer.close()
    assert len(engine.seen) == 3
    await idle(one)


@pytest.mark.parametrize("first", [request({"model": "nobody"}), START + b"host: localhost\r\n\r\n"])
async def test_what_comes_behind_a_request_that_the_application_answers_is_answered_too(
    front: Any, first: bytes
) -> None:
    one, _ = await front(says(whole(ANSWER)))
    answer = await raw(one, first + request(), until=ANSWER)
    assert answer.startswith(b"HTTP/1.1 4")
    assert answer.count(b"HTTP/1.1 ") == 2
    await idle(one)


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False
        self.closed = False

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.written.append(data)

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return self.closed

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return len(b"".join(self.written))

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


async def test_what_comes_before_the_next_request_is_looked_at_stands_behind_it(front: Any) -> None:
    one, _ = await front(says(whole(ANSWER)))
    one.gateway.keys.create("admin", Role.ADMIN)
    wire, client = Wire(), fronts.Front(one.server.config, one.server.server_state, {})
    client.connection_made(cast(Any, wire))
    data = request() * 3
    client.data_received(data[: len(request()) + 20])  # the first is refused at once
    client.data_received(data[len(request()) + 20 :])
    await one.until(lambda: len(wire.written) == 3)
    assert all(answer.startswith(b"HTTP/1.1 401 ") for answer in wire.written)
    client.connection_lost(None)


async def test_a_client_that_does_not_read_is_known_to_whoever_takes_over_its_connection(front: Any) -> None:
    one, _ = await front(says(whole(ANSWER)))
    wire, client = Wire(), fronts.Front(one.server.config, one.server.server_state, {})
    client.connection_made(cast(Any, wire))
    client.pause_writing()
    client.data_received(b"GET /live HTTP/1.1\r\n")
    assert wire.protocol.flow.write_paused
    wire.protocol.resume_writing()
    assert not wire.protocol.flow.write_paused
    wire.protocol.connection_lost(None)


LARGE = b"{" + b" " * (8 << 20) + b"}"
WAYS = ["", "expect: 100-continue\r\n"]


@pytest.mark.parametrize("more", WAYS)
async def test_who_does_not_read_gets_no_answers_beside_those_that_wait(front: Any, more: str) -> None:
    one, (engine,) = await front(says(whole(LARGE)))
    reader, writer = await connect(one)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(request(more=more) * 5)
    await one.until(lambda: engine.seen)
    await asyncio.sleep(0.3)
    assert len(engine.seen) == 1
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    read = 0
    while read < 5 * len(LARGE):
        read += len(await asyncio.wait_for(reader.read(1 << 20), 5))
    writer.close()
    assert len(engine.seen) == 5
    await idle(one)


@pytest.mark.parametrize("more", [*WAYS, "connection: close\r\n"])
async def test_who_never_reads_an_answer_that_is_over_is_cut_off(
    front: Any, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setattr(pace, "UNREAD_S", 0.3)
    one, (engine,) = await front(says(whole(LARGE)))
    reader, writer = await connect(one)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(request(more=more))
    await one.until(lambda: engine.seen)
    await one.until(lambda: not one.server.server_state.connections)
    await idle(one)
    writer.transport.abort()


async def test_a_connection_that_is_kept_for_nothing_is_closed_although_a_little_waits_unread(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "UNREAD_S", 0.1)
    one, _ = await front(says(whole(ANSWER)))
    monkeypatch.setattr(one.server.config, "timeout_keep_alive", 0.1)
    wire, client = Wire(), fronts.Front(one.server.config, one.server.server_state, {})
    client.connection_made(cast(Any, wire))
    client.data_received(request({"model": "nobody"}))
    await one.until(lambda: wire.aborted)
    assert wire.written
    client.connection_lost(None)


@pytest.mark.parametrize("streams", [False, True])
async def test_what_an_engine_says_to_a_client_that_is_just_gone_is_dropped(
    front: Any, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = asyncio.Event()

    async def say(backend: Backend, *talk: Any) -> None:
        await go_on.wait()
        talk[1].write(STREAM + chunk(event("a")) + END if streams else whole(ANSWER))

    one, (engine,) = await front(say)
    wire, client = Wire(), fronts.Front(one.server.config, one.server.server_state, {})
    client.connection_made(cast(Any, wire))
    client.data_received(request({"stream": streams}))
    await one.until(lambda: engine.seen)
    wire.closed = True  # ``connection_lost`` comes a moment later
    go_on.set()
    await idle(one)
    client.connection_lost(None)
    assert wire.written == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_an_answer_may_take_longer_than_a_head(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)

    async def say(backend: Backend, *talk: Any) -> None:
        await asyncio.sleep(0.3)
        talk[1].write(whole(ANSWER))

    one, _ = await front(say)
    assert (await raw(one, request(), until=ANSWER)).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_that_is_kept_for_nothing_is_closed(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = await front(says(whole(ANSWER)))
    monkeypatch.setattr(one.server.config, "timeout_keep_alive", 0.2)
    assert (await raw(one, request())).endswith(ANSWER)


async def test_a_server_that_ends_closes_what_is_idle_and_lets_the_rest_finish(front: Any) -> None:
    go_on = asyncio.Event()

    async def say(backend: Backend, *talk: Any) -> None:
        await go_on.wait()
        talk[1].write(whole(ANSWER))

    one, (engine,) = await front(say)
    resting, _ = await connect(one)
    busy, writer = await connect(one)
    writer.write(request())
    await one.until(lambda: engine.seen)
    for each in list(one.server.server_state.connections):
        each.shutdown()
    assert await asyncio.wait_for(resting.read(), 5) == b""
    go_on.set()
    answer = await asyncio.wait_for(busy.read(), 5)
    assert answer.endswith(ANSWER)
    assert b"\r\nconnection: close\r\n" in answer
