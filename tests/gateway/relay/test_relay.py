"""Requests to external engines: what passes, what does not, and what a client sees when something breaks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import caller, pace
from gateway.keys import Role
from gateway.relay import tries
from gateway.terms import KeyLimits
from tests.collector import collecting
from tests.gateway.relay.asking import ANSWER, PATH, USAGE, ask, connect, idle, raw, request
from tests.gateway.relay.backend import END, STREAM, Backend, chunk, event, says, whole


async def test_an_answer_passes_with_the_ids_and_keys_of_each_side(front: Any, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("engine-secret")
    say = says(whole(ANSWER, more="access-control-allow-origin: *\r\nset-cookie: a=b\r\nx-engine: yes\r\n"))
    one, (engine,) = await front(say, fields={"key_file": str(key)})
    _, secret = one.gateway.keys.create("c", Role.ADMIN)
    headers = {"authorization": f"Bearer {secret}", "x-request-id": "mine", "cookie": "c=d", "x-mine": "1"}
    found = await ask(one, headers | {"connection": "keep-alive, x-hop", "x-hop": "1"}, unknown_field={"a": [1]})
    assert (found.status_code, found.content) == (200, ANSWER)
    assert found.headers["x-request-id"] == "mine"
    assert found.headers["x-prfaas-route"] == "local"
    assert found.headers["x-engine"] == "yes"
    assert "access-control-allow-origin" not in found.headers
    assert "set-cookie" not in found.headers
    head, body = engine.seen[0]
    assert json.loads(body)["unknown_field"] == {"a": [1]}
    lines = head.lower().split(b"\r\n")
    assert b"authorization: bearer engine-secret" in lines
    assert b"x-request-id: mine" in lines
    assert b"x-mine: 1" in lines
    assert secret.lower().encode() not in head.lower()
    assert not [line for line in lines if line.startswith((b"cookie", b"x-hop", b"connection"))]
    metrics = (await one.client.get("/metrics", headers=headers)).text
    assert 'prfaas_requests_total{endpoint="/v1/completions",route="local",status="200"} 1.0' in metrics
    assert "prfaas_generation_tokens_total 2.0" in metrics
    await idle(one)


@pytest.mark.parametrize(
    "parts",
    [
        [chunk(event("a")), chunk(event("b")), END],
        [chunk(event("a")) + chunk(event("b")) + END],
        [bytes([one]) for one in chunk(event("a")) + chunk(event("b")) + END],
        [chunk(event("a")[:9]), chunk(event("a")[9:] + event("b")[:5]), chunk(event("b")[5:]), END],
    ],
)
async def test_a_stream_is_the_same_however_it_comes(front: Any, parts: list[bytes]) -> None:
    one, _ = await front(says(STREAM, *parts))
    found = await ask(one, stream=True)
    assert found.content == event("a") + event("b") + b"data: [DONE]\n\n"
    await idle(one)


async def test_a_client_of_http_1_0_reads_a_stream_until_its_end(front: Any) -> None:
    one, _ = await front(says(STREAM, chunk(event("a")), END))
    answer = await raw(one, request({"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == event("a") + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "parts",
    [
        [STREAM, chunk(event("a"))],
        [STREAM, chunk(event("a")), b"20\r\ndata: {"],
        [STREAM, chunk(event("a")), chunk(b'data: {"half')],
        [STREAM, chunk(event("a")), b"garbage\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event("a")],
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_event(front: Any, parts: list[bytes]) -> None:
    one, engines = await front(says(*parts, then_close=True))
    found = await ask(one, stream=True)
    events = found.text.split("\n\n")
    assert events[0] == event("a").decode().strip()
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"].startswith("engine_")
    assert events[2:] == [""]
    assert len(engines[0].seen) == 1
    await idle(one)


async def test_a_whole_answer_that_breaks_off_is_not_taken_for_whole(front: Any) -> None:
    one, _ = await front(says(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", then_close=True))
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(one)
    await idle(one)


async def test_what_failed_before_its_first_byte_is_tried_elsewhere(front: Any) -> None:
    one, engines = await front(says(whole(b"{}", "503 Busy")), says(b"", then_close=True), says(whole(ANSWER)))
    for _ in range(3):
        found = await ask(one)
        assert (found.status_code, found.content) == (200, ANSWER)
    assert len(engines[2].seen) == 3
    assert len(engines[0].seen) + len(engines[1].seen) >= 2
    await idle(one)


ERROR = b'{"error": {"message": "no", "type": "x", "param": null, "code": "y"}}'


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (whole(ERROR, "400 Bad"), 400, "y"),
        (whole(ERROR, "503 Busy"), 503, "y"),
        (whole(b"<html>", "500 Oops", "text/html"), 502, "engine_failed"),
        (whole(b"nobody", "429 Many", "text/plain"), 429, "engine_busy"),
        (whole(ERROR, "401 Who"), 502, "engine_refused"),
        (b"garbage\r\n\r\n", 502, "engine_protocol"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (10 << 20), 502, "engine_too_large"),
    ],
)
async def test_an_engines_failure_is_an_error_object(
    front: Any, monkeypatch: pytest.MonkeyPatch, said: bytes, status: int, code: str
) -> None:
    monkeypatch.setattr(tries.Retrying, "next_s", lambda *_: None)
    one, _ = await front(says(said))
    found = await ask(one)
    assert (found.status_code, found.json()["error"]["code"]) == (status, code)
    await idle(one)


async def test_a_silent_engine_meets_the_requests_deadline(front: Any) -> None:
    one, _ = await front(says(), request_timeout_s=0.3)
    found = await ask(one)
    assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline")
    await idle(one)


async def test_a_stream_that_stalls_is_ended(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "STALLED_S", 0.2)

    async def say(backend: Backend, *talk: Any) -> None:
        talk[1].write(STREAM + chunk(event("a")))
        await asyncio.sleep(10)

    one, _ = await front(say)
    found = await ask(one, stream=True)
    assert "engine_stalled" in found.text
    await idle(one)


async def endless(
    backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes
) -> None:
    """Speak until nobody listens."""
    writer.write(STREAM)
    try:
        while True:
            writer.write(chunk(event("x" * 20_000)))
            await writer.drain()
            await asyncio.sleep(0)
    finally:
        backend.gone.set()


async def test_a_client_that_leaves_ends_the_engines_work(front: Any) -> None:
    one, (engine,) = await front(endless)
    await raw(one, request({"stream": True}), until=b"data: ")
    await asyncio.wait_for(engine.gone.wait(), 5)
    await idle(one)


async def test_a_client_that_never_reads_stops_the_engine_and_is_cut_off(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "UNREAD_S", 0.5)
    one, (engine,) = await front(endless)
    reader, writer = await connect(one)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(request({"stream": True}))
    await asyncio.wait_for(engine.gone.wait(), 5)
    await idle(one)
    writer.close()


async def test_requests_on_one_connection_are_answered_in_order(front: Any) -> None:
    async def say(backend: Backend, *talk: Any) -> None:
        writer, body = talk[1], talk[3]
        prompt = json.loads(body)["prompt"]
        await asyncio.sleep(0.05 if prompt == "slow" else 0)
        writer.write(whole(prompt.encode()))

    one, _ = await front(say)
    three = request({"prompt": "slow"}) + b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" + request({"prompt": "quick"})
    answer = await raw(one, three, until=b"quick")
    assert answer.index(b"slow") < answer.index(b"live") < answer.index(b"quick")
    await idle(one)


async def test_a_chunked_body_with_trailers_and_one_that_waits_to_be_asked_for(front: Any) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    data = json.dumps({"model": "m", "prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    trailers = b"0\r\nx-more: a\r\nx-prfaas-route: forged\r\n\r\n"
    assert ANSWER in await raw(one, head + chunk(data[:5]) + chunk(data[5:]) + trailers, until=ANSWER)
    reader, writer = await connect(one)
    before, _, body = request(more="expect: 100-continue\r\n").partition(b"\r\n\r\n")
    writer.write(before + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert [json.loads(body) for _, body in engine.seen] == [{"model": "m", "prompt": "a"}] * 2
    assert b"forged" not in engine.seen[0][0]


async def test_a_body_that_trickles_or_is_too_large_is_refused(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "BODY_TIMEOUT_S", 0.2)
    one, (engine,) = await front(says(whole(ANSWER)), max_body_bytes=1000)
    head, _, body = request().partition(b"\r\n\r\n")
    assert b" 408 " in await raw(one, head + b"\r\n\r\n" + body[:3], until=b"body_timeout")
    assert b" 413 " in await raw(one, request({"prompt": "x" * 2000}), until=b"body_too_large")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b" 413 " in await raw(one, head + chunk(b"x" * 2000), until=b"body_too_large")
    assert engine.seen == []
    await idle(one)


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(front: Any) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    _, writer = await connect(one)
    writer.write(request()[:-3])
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    await idle(one)
    assert engine.seen == []


async def test_a_large_request_to_an_engine_that_stops_reading_meets_the_deadline(front: Any) -> None:
    async def talk(backend: Backend, reader: asyncio.StreamReader, *rest: Any) -> None:
        await asyncio.sleep(10)

    one, _ = await front(talk, request_timeout_s=0.5)
    found = await ask(one, prompt="x" * (8 << 20))
    assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline")
    await idle(one)


async def test_where_kv_is_a_client_cannot_say(front: Any) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    found = await ask(one, kv_transfer_params={"remote_host": "10.0.0.1"})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert engine.seen == []


async def test_other_models_and_what_is_no_json_are_the_applications(front: Any) -> None:
    one, (engine,) = await front(says(whole(ANSWER)))
    assert (await ask(one, model="nobody")).status_code == 404
    broken = await one.client.post(PATH, content=b"{not json")
    assert broken.status_code == 400
    assert b" 405 " in await raw(one, b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n", until=b"method")
    assert engine.seen == []


async def test_limits_hold_and_tokens_are_counted_by_the_engine(front: Any) -> None:
    events = [event("a"), b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\n"]
    one, (engine,) = await front(says(STREAM, *map(chunk, events), END))
    one.gateway.keys.create("admin", Role.ADMIN)
    limits = KeyLimits(tokens_per_minute=1000, concurrency=1)
    _, secret = one.gateway.keys.create("c", Role.CLIENT, limits=limits)
    headers = {"authorization": f"Bearer {secret}"}
    found = await ask(one, headers, stream=True)
    assert found.content == event("a") + b"data: [DONE]\n\n"
    assert json.loads(engine.seen[0][1])["stream_options"] == {"include_usage": True}
    asked = await ask(one, headers, stream=True, stream_options={"include_usage": True})
    assert b'"usage"' in asked.content
    assert (await ask(one, {"authorization": "Bearer wrong"})).status_code == 401
    assert (await ask(one, headers, prompt="x" * 40_000)).status_code == 429
    await idle(one)


async def test_usage_that_the_gateway_asked_for_is_taken_out_whichever_line_ends_an_engine_writes(front: Any) -> None:
    usage = b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\n"
    for line_end in (b"\n", b"\r\n"):
        told, kept = (
            b"".join(events).replace(b"\n", line_end)
            for events in ((event("a"), usage, b"data: [DONE]\n\n"), (event("a"), b"data: [DONE]\n\n"))
        )
        for answer in (STREAM + chunk(told) + b"0\r\n\r\n", whole(told, kind="text/event-stream")):
            one, _ = await front(says(answer))
            one.gateway.keys.create("admin", Role.ADMIN)
            _, secret = one.gateway.keys.create("c", Role.CLIENT, limits=KeyLimits(tokens_per_minute=1000))
            found = await ask(one, {"authorization": f"Bearer {secret}"}, stream=True)
            assert found.content == kept


async def test_where_every_engine_is_full_requests_wait_their_turn(front: Any) -> None:
    at_once = most = 0

    async def say(backend: Backend, *talk: Any) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.03)
        at_once -= 1
        talk[1].write(whole(ANSWER))

    one, _ = await front(say, fields={"max_running": 2})
    found = await asyncio.gather(*(ask(one) for _ in range(8)))
    assert [each.status_code for each in found] == [200] * 8
    assert most == 2
    await idle(one)


async def test_a_key_that_may_not_leave_its_region_reaches_no_engine_elsewhere(front: Any) -> None:
    one, (engine,) = await front(says(whole(ANSWER)), fields={"cluster": "far"})
    one.gateway.keys.create("admin", Role.ADMIN)
    _, anywhere = one.gateway.keys.create("a", Role.CLIENT)
    _, home = one.gateway.keys.create("b", Role.CLIENT, limits=KeyLimits(barred=frozenset({"far"})))
    found = await ask(one, {"authorization": f"Bearer {anywhere}"})
    assert (found.status_code, found.headers["x-prfaas-route"]) == (200, "remote:far")
    refused = await ask(one, {"authorization": f"Bearer {home}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "residency")
    assert len(engine.seen) == 1


async def test_a_breaker_opens_and_nobody_is_kept_waiting_for_it(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries.Retrying, "next_s", lambda *_: None)
    one, (engine,) = await front(says(b"garbage\r\n\r\n"))
    found = [(await ask(one)).json()["error"]["code"] for _ in range(12)]
    assert found == ["engine_protocol"] * 10 + ["breaker_open"] * 2
    assert len(engine.seen) == 10


async def test_a_relayed_request_is_a_span_in_its_callers_trace_and_the_engine_is_told_it(front: Any) -> None:
    with collecting() as collector:
        one, [engine] = await front(says(whole(ANSWER)), otlp_endpoint=collector.url)
        trace = "5" * 32
        answer = await ask(one, headers={"traceparent": f"00-{trace}-{'6' * 16}-01"})
        assert answer.status_code == 200
        await one.until(lambda: collector.trace(trace), 10)
    [span] = collector.trace(trace)
    assert (span.parent, span.attributes["http.response.status_code"]) == ("6" * 16, 200)
    told = [line for line in engine.seen[-1][0].split(b"\r\n") if line.startswith(b"traceparent")]
    assert told == [f"traceparent: 00-{trace}-{span.span}-01".encode()]


async def test_pages_of_a_named_origin_may_read_relayed_answers(front: Any) -> None:
    one, _ = await front(says(whole(ANSWER)), cors_origins=("https://chat.example",))
    _, secret = one.gateway.keys.create("c", Role.ADMIN)
    answer = await ask(one, headers={"origin": "https://chat.example", "authorization": f"Bearer {secret}"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"


async def test_a_key_that_may_not_name_the_model_gets_404_and_limits_are_told(front: Any) -> None:
    one, [engine] = await front(says(whole(ANSWER)))
    one.gateway.keys.create("root", Role.ADMIN)
    _, bound = one.gateway.keys.create("c", Role.CLIENT, limits=KeyLimits(models=frozenset({"tiny"})))
    _, free = one.gateway.keys.create("c", Role.CLIENT, limits=KeyLimits(requests_per_minute=600))
    refused = await ask(one, headers={"authorization": f"Bearer {bound}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert not engine.seen
    answer = await ask(one, headers={"authorization": f"Bearer {free}"})
    assert answer.headers["x-ratelimit-limit-requests"] == "600"
