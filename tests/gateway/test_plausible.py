"""What no working node says: it ends the attempt, names the field, and leaves no trace in figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway import plausible
from kvcache.control import Delta, Finished, GenerateJob, PrefillDone, PrefillJob, Sampling, TokenLogprob, TransferDone
from kvcache.wire import Role
from scheduler.prefill_curve import PrefillTimes
from scheduler.replay import replay
from tests.gateway.conftest import Open
from tests.gateway.fakes import FakeNode, answer_well, finish, transfer_of

NAN, INF = float("nan"), float("inf")
GOOD_END = Finished("g", "stop", 4, 2, 0)
ENDS: list[dict[str, Any]] = [
    {"reason": "exploded"},
    {"prompt_tokens": -1},
    {"prompt_tokens": 1 << 40},
    {"cached_tokens": -1},
    {"cached_tokens": 5},
    {"completion_tokens": -1},
    {"completion_tokens": 9},
]
DELTAS = {
    "more tokens than were asked for": Delta("g", "", (5,) * 9),
    "token_ids": Delta("g", "", (-1,)),
    "a token id beyond any vocabulary": Delta("g", "", (1 << 63,)),
    "text": Delta("g", "x" * 100_000, (5,)),
    "logprobs that were not asked for": Delta("g", "x", (5,), ((TokenLogprob(5, 0.0),),)),
}
LOGPROBS = [None, (), ((),), ((TokenLogprob(-1, 0.0),),), ((TokenLogprob(5, 0.0),),) * 2]
TRANSFERS: list[dict[str, Any]] = [
    {"backlog_bytes": -1},
    {"backlog_bytes": 1001},
    {"raw_bytes": -1},
    {"raw_bytes": 1001},
    {"wire_bytes": 0},
    {"wire_bytes": 1 << 60},
    {"transfer_s": NAN},
    {"exposed_s": INF},
    {"exposed_s": -1.0},
    {"transfer_s": 1e308},
    {"kv_digest": bytes(1000)},
]


@pytest.mark.parametrize("change", ENDS, ids=str)
async def test_an_end_that_cannot_be_ends_the_answer_with_an_error(stage: Open, change: dict[str, Any]) -> None:
    one = await stage()

    async def lie(node: FakeNode, job: GenerateJob) -> None:
        await node.send(msgspec.structs.replace(GOOD_END, generation=job.generation, **change))

    await one.node("d", Role.DECODE, on_generate=lie)
    answer = await one.complete(words=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "protocol")
    assert "prfaas_generation_tokens_total 0.0" in (await one.client.get("/metrics")).text
    attempt = (await one.decision(answer.headers["x-request-id"]))["attempts"][0]
    assert attempt["detail"].startswith("Finished: ")


@pytest.mark.parametrize("name", DELTAS)
async def test_a_delta_that_cannot_be_ends_the_answer_with_an_error(stage: Open, name: str) -> None:
    one = await stage()

    async def lie(node: FakeNode, job: GenerateJob) -> None:
        await node.send(msgspec.structs.replace(DELTAS[name], generation=job.generation))
        await finish(node, job, tokens=1)

    await one.node("d", Role.DECODE, on_generate=lie)
    answer = await one.complete(words=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "protocol")


@pytest.mark.parametrize("entries", LOGPROBS, ids=lambda entries: str(entries)[:30])
async def test_logprobs_that_do_not_fit_their_tokens_end_the_answer(stage: Open, entries: Any) -> None:
    one = await stage()

    async def lie(node: FakeNode, job: GenerateJob) -> None:
        await node.send(Delta(job.generation, "x", (5,), entries))
        await finish(node, job, tokens=1)

    await one.node("d", Role.DECODE, on_generate=lie)
    answer = await one.complete(words=1, logprobs=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "protocol")


async def test_a_node_that_never_stops_talking_is_stopped_at_the_tokens_that_were_asked_for(stage: Open) -> None:
    one = await stage()

    async def flood(node: FakeNode, job: GenerateJob) -> None:
        while True:
            await node.send(Delta(job.generation, "x", (5,)))
            await asyncio.sleep(0)  # the gateway shares this loop, and must get to hear it

    node = await one.node("d", Role.DECODE, on_generate=flood)
    answer = await one.complete(words=1, stream=True)
    assert '"code":"protocol"' in answer.text
    await one.until(lambda: node.cancelled)


async def test_what_follows_the_end_of_an_answer_is_dropped(stage: Open) -> None:
    one = await stage()

    async def twice(node: FakeNode, job: GenerateJob) -> None:
        await answer_well(node, job)
        await finish(node, job)
        await node.send(Delta(job.generation, "late", (5,)))

    await one.node("d", Role.DECODE, on_generate=twice)
    for _ in range(2):
        answer = await one.complete(words=1)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "t0 t1 t2 ")


PREFILLS: list[dict[str, Any]] = [
    {"tokens": 1 << 40},
    {"tokens": -1},
    *({"compute_s": seconds} for seconds in (NAN, -1.0, 5e-324, 1e308)),
]


@pytest.mark.parametrize("change", PREFILLS, ids=str)
async def test_a_prefill_that_cannot_be_teaches_nothing(stage: Open, change: dict[str, Any]) -> None:
    one = await stage()

    async def lie(node: FakeNode, job: PrefillJob) -> None:
        done = PrefillDone(transfer_of(node, job.ticket), 0.001, len(job.token_ids) - 1)
        await node.send(msgspec.structs.replace(done, **change))

    await one.pair(on_prefill=lie)
    assert (await one.complete(words=300)).status_code == 200
    session = one.gateway.registry.node("p-local")
    assert session is not None
    assert session.speed.tokens_per_s == 1000.0


async def test_only_the_first_report_of_a_prefill_teaches(stage: Open) -> None:
    one = await stage()

    async def stutter(node: FakeNode, job: PrefillJob) -> None:
        for _ in range(50):
            await node.send(PrefillDone(transfer_of(node, job.ticket), 0.001, len(job.token_ids) - 1))

    await one.pair(on_prefill=stutter)
    answer = await one.complete(words=300)
    assert answer.status_code == 200
    session = one.gateway.registry.node("p-local")
    assert session is not None
    once = PrefillTimes()
    once.claim(1000.0)
    once.observe(0, answer.json()["usage"]["prompt_tokens"] - 1, 0.001)
    assert session.speed.curve == once.curve


def check(change: dict[str, Any]) -> bool:
    done = TransferDone(b"t" * 16, 1000, 500, "raw", 0.1, 0.0, bytes(16))
    return plausible.transferred(msgspec.structs.replace(done, **change), 1000)


def test_a_transfer_is_held_against_its_plan() -> None:
    assert check({})
    assert [change for change in TRANSFERS if check(change)] == []


def test_a_good_answer_passes() -> None:
    job = GenerateJob("g", (2, 5, 6, 7), Sampling(max_tokens=2, logprobs=0), None, 0.0)
    wrong: Callable[..., str | None] = plausible.AnswerCheck(job).wrong
    entry = ((TokenLogprob(5, -1.0),),)
    assert [wrong(item) for item in (Delta("g", "a", (5,), entry), Delta("g", "b", (5,), entry), GOOD_END)] == [
        None
    ] * 3


@pytest.mark.parametrize("rate", [NAN, INF, -1.0, 5e-324, 1e308])
async def test_speeds_that_no_node_has_disturb_nobody(stage: Open, rate: float) -> None:
    one = await stage()
    await one.pair()
    node = await one.node("p-odd", Role.PREFILL)
    await node.heartbeat(prefill_tokens_per_s=rate, decode_tokens_per_s=rate)
    session = one.gateway.registry.node("p-odd")
    assert session is not None
    await one.until(lambda: session.heartbeat is not None and session.heartbeat.prefill_tokens_per_s != 1000.0)
    answer = await one.complete(words=300)
    assert answer.status_code == 200
    for path in ("/v1/status", "/v1/nodes", "/metrics"):
        assert (await one.client.get(path)).status_code == 200
    record = await one.client.get(f"/v1/decisions/{answer.headers['x-request-id']}")
    assert [way.same for way in replay(record.content)] == [True]
