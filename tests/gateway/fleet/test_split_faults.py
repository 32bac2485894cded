"""Faults at every step of a split, in each dialect: bounded time, both legs ended, nothing kept, and a true answer."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from gateway.config import FallbackPolicy
from tests.gateway.fleet.conftest import DIALECTS, Pair, Pairs
from tests.gateway.fleet.http_engine import Call, hang, status
from tests.gateway.fleet.strict_engines import NixlPrefill
from tests.gateway.fleet.test_split import ALL, VLLM

SOON_S = 2.0
NIXL = [name for name in ALL if "nixl" in name]
CONCURRENT = [name for name in ALL if "nixl" not in name]


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("code", [500, 503])
async def test_a_prefill_that_breaks_ends_decode_and_is_mended_at_home(pairs: Pair, dialect: str, code: int) -> None:
    one = await pairs(dialect)
    one.p.fault = status(code)
    began = time.monotonic()
    answer = await one.ask()
    assert time.monotonic() - began < SOON_S
    if one.stays_whole:
        assert answer.json() | {"id": 0} == (await one.alone()).json() | {"id": 0}
        assert answer.headers["x-prfaas-route-reason"] == "fallback"
        assert answer.headers["x-prfaas-prefill"] == "in-place"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, f"http_{code}")
    await one.settled()
    record = await one.stage.decision(answer.headers["x-request-id"])
    assert record["attempts"][0]["cause"] == f"http_{code}"


@pytest.mark.parametrize("dialect", ALL)
async def test_what_a_prefill_engine_refuses_is_the_clients_and_ends_decode(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.p.fault = status(400)
    answer = await one.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "told to answer 400")
    await one.settled()


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_that_never_answers_is_given_up_in_time(pairs: Pair, dialect: str, stream: bool) -> None:
    one = await pairs(dialect, request_timeout_s=0.5)
    one.p.fault = hang
    began = time.monotonic()
    answer = await one.ask(stream=stream)
    assert time.monotonic() - began < 0.5 + SOON_S
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    await one.settled()
    assert one.p.ended_early == 1


@pytest.mark.parametrize("dialect", ["sglang", "vllm-nixl-pull"])
async def test_a_prefill_later_than_predicted_is_mended_before_the_deadline(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect, request_timeout_s=10.0)
    fleet = one.stage.gateway.fleet
    for name, seconds in (("p0", 0.01), ("d1", 5.0)):
        engine = fleet.engine(name)
        assert engine is not None
        engine.speed.observe(0, 60, seconds)
    now = asyncio.get_running_loop().time()
    fleet.link("east").observe(1 << 20, 0.01, 0.01, now)
    one.p.fault = hang
    began = time.monotonic()
    answer = await one.ask()
    assert 1.9 < time.monotonic() - began < 2.0 + SOON_S
    if one.stays_whole:
        assert answer.headers["x-prfaas-route-reason"] == "fallback"
    else:
        assert answer.json()["error"]["code"] == "late"
    await one.settled()


@pytest.mark.parametrize("dialect", ALL)
async def test_what_a_decode_engine_refuses_is_the_clients_and_frees_prefill_at_once(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.d.fault = only_generations(status(400))
    answer = await one.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "told to answer 400")
    await one.settled()


@pytest.mark.parametrize("dialect", ALL)
async def test_a_decode_engine_that_breaks_is_replaced_and_prefill_is_freed(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect, decodes=2)
    one.d.fault = only_generations(status(500))
    for _ in range(3):
        answer = await one.ask()
        assert answer.json() | {"id": 0} == (await one.alone()).json() | {"id": 0}
    await one.settled()
    assert one.decodes[1].calls


@pytest.mark.parametrize("dialect", ALL)
async def test_a_decode_engine_that_cannot_be_reached_is_replaced_and_prefill_is_freed(
    pairs: Pair, dialect: str
) -> None:
    one = await pairs(dialect, decodes=2)
    await one.d.stop()
    for _ in range(2):
        answer = await one.ask()
        assert answer.json() | {"id": 0} == (await one.alone()).json() | {"id": 0}
    await one.settled()


@pytest.mark.parametrize("dialect", ALL)
async def test_without_another_decode_engine_the_failure_is_said(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.d.fault = only_generations(status(500))
    answer = await one.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "http_500")
    await one.settled()


@pytest.mark.parametrize("dialect", ALL)
async def test_a_client_that_leaves_while_prefill_computes_ends_both(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.p.fault = hang
    await leaves(one, lambda: bool(one.p.running))
    assert one.p.ended_early == 1


@pytest.mark.parametrize("dialect", ALL)
async def test_a_client_that_leaves_before_decode_speaks_ends_both(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.d.fault = only_generations(hang)
    await leaves(one, lambda: bool(one.d.running and one.p.calls))
    assert one.d.ended_early >= 1


@pytest.mark.parametrize("dialect", ALL)
async def test_a_client_that_leaves_a_stream_ends_it(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.d.chunk_s = 0.01
    body = {"model": "tiny", "prompt": list(range(1, 61)), "max_tokens": 10_000, "stream": True}
    async with one.stage.client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await one.settled()
    assert one.d.ended_early == 1


@pytest.mark.parametrize("dialect", ALL)
async def test_a_decode_engine_that_dies_in_mid_stream_ends_in_an_error_event(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.d.breaks_after = 2
    answer = await one.ask(stream=True)
    last = answer.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] in ("closed", "cut_off")
    assert "[DONE]" not in answer.text
    await one.settled()


@pytest.mark.parametrize("dialect", VLLM)
async def test_the_policy_that_fails_closed_mends_nothing(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect, fallback=FallbackPolicy.FAIL)
    one.p.fault = status(500)
    answer = await one.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "http_500")
    assert not [call for call in one.d.calls if "kv_transfer_params" not in call.body]
    await one.settled()


@pytest.mark.parametrize("dialect", CONCURRENT)
async def test_prefill_that_fails_after_decode_began_to_wait_cancels_it_at_once(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)

    async def late_failure(call: Call) -> None:
        await one.stage.until(lambda: bool(one.d.running))
        await asyncio.sleep(0.05)
        await status(500)(call)

    one.p.fault = late_failure
    began = time.monotonic()
    await one.ask()
    assert time.monotonic() - began < SOON_S
    await one.settled()
    assert one.d.ended_early == 1


@pytest.mark.parametrize("dialect", VLLM)
async def test_prefill_that_ends_with_its_first_token_all_the_same_is_answered_at_home(
    pairs: Pair, dialect: str
) -> None:
    """As an engine does that knows no ignore_eos."""
    one = await pairs(dialect)
    one.p.finish = lambda call: "stop"
    one.p.hands_over = False
    answer = await one.ask()
    assert answer.json() | {"id": 0} == (await one.alone()).json() | {"id": 0}
    assert answer.headers["x-prfaas-prefill"] == "in-place"
    record = await one.stage.decision(answer.headers["x-request-id"])
    assert record["attempts"][0]["cause"] == "first_token_ended"
    engine = one.stage.gateway.fleet.engine("p0")
    assert engine is not None
    assert engine.breaker.admits(asyncio.get_running_loop().time())


@pytest.mark.parametrize("dialect", NIXL)
async def test_prefill_without_a_connector_is_noticed_and_said(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.p.hands_over = False
    answer = await one.ask()
    assert answer.headers["x-prfaas-prefill"] == "in-place"
    record = await one.stage.decision(answer.headers["x-request-id"])
    assert record["attempts"][0]["cause"] == "no_kv_transfer_params"
    assert one.wire.recomputed == 0


@pytest.mark.parametrize("dialect", NIXL)
async def test_kv_whose_lease_runs_out_is_never_read(pairs: Pair, dialect: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(NixlPrefill, "lease_s", 0.3)
    one = await pairs(dialect, fields="lease_s = 0.3")

    async def busy(call: Call) -> None:
        if "kv_transfer_params" in call.body and call.path == "/v1/completions" and call.body["model"] == "tiny":
            await call.unless_left(asyncio.sleep(1.0))

    one.d.fault = busy
    answer = await one.ask(stream=True)
    assert "GARBAGE" not in answer.text
    assert answer.headers["x-prfaas-route-reason"] == "fallback"
    record = await one.stage.decision(answer.headers["x-request-id"])
    assert record["attempts"][0]["cause"] == "lease_expired"


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
async def test_an_engine_that_keeps_failing_is_left_alone(pairs: Pair, dialect: str) -> None:
    one = await pairs(dialect)
    one.p.fault = status(500)
    engine = one.stage.gateway.fleet.engine("p0")
    assert engine is not None
    now = asyncio.get_running_loop().time()
    for _ in range(engine.breaker.values.failures):
        engine.breaker.begin(now).end(False, now)
    before = len(one.p.calls)
    answer = await one.ask()
    assert len(one.p.calls) == before
    if one.stays_whole:
        assert (answer.status_code, answer.headers["x-prfaas-route-reason"]) == (200, "no_local_prefill_node")
    else:
        assert answer.status_code == 503


def only_generations(fault: Any) -> Any:
    """Not for what tells an engine to let go of KV."""

    async def chosen(call: Call) -> None:
        if call.body.get("model") == "tiny":
            await fault(call)

    return chosen


async def leaves(one: Pairs, when: Any) -> None:
    """A client that goes away once that is so; then nothing may be left."""
    async with httpx.AsyncClient(base_url=one.stage.url) as client:
        body = {"model": "tiny", "prompt": list(range(1, 61)), "max_tokens": 4}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await one.stage.until(when)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await one.settled()


async def test_an_engine_that_was_given_more_meanwhile_may_take_longer(pairs: Pair) -> None:
    one = await pairs("vllm-nixl-pull")
    fleet = one.stage.gateway.fleet
    for name, seconds in (("p0", 0.5), ("d1", 50.0)):
        engine = fleet.engine(name)
        assert engine is not None
        engine.speed.observe(0, 60, seconds)
    fleet.link("east").observe(1 << 20, 0.01, 0.01, asyncio.get_running_loop().time())

    async def all_at_once(call: Call) -> None:
        await call.unless_left(asyncio.sleep(2.7))

    one.p.fault = all_at_once
    answers = await asyncio.gather(*(one.ask() for _ in range(5)))
    assert [answer.headers["x-prfaas-route"] for answer in answers] == ["remote:east"] * 5
