"""The life of a request over real sockets: both legs, failures before and after the first token, fallback, cancel."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import msgspec
import pytest

from gateway.config import FallbackPolicy
from kvcache.control import GenerateJob, PrefillDone, PrefillJob, TransferDone
from kvcache.ticket import verify_ticket
from kvcache.wire import Role
from tests.gateway.conftest import Open
from tests.gateway.fakes import (
    RAW_BYTES,
    WIRE_BYTES,
    FakeNode,
    answer_well,
    delta,
    failing,
    finish,
    never,
    receive_kv,
    transfer_of,
)


async def test_a_short_prompt_is_prefilled_at_home_and_says_so(stage: Open) -> None:
    one = await stage()
    prefill, decode = await one.pair()
    answer = await one.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "t0 t1 t2 "
    assert answer.headers["x-prfaas-route"] == "local"
    assert answer.headers["x-prfaas-route-reason"] == "below_threshold"
    assert answer.headers["x-prfaas-prefill"] == "node"
    [job] = prefill.jobs(PrefillJob)
    assert job.codec == "raw"
    assert len(decode.jobs(GenerateJob)) == 1


async def test_a_long_prompt_goes_to_the_remote_cluster(stage: Open) -> None:
    one = await stage()
    prefill, _ = await one.pair("east")
    await one.node("p-local", prefill.join.role)
    answer = await one.complete(words=60)
    assert answer.headers["x-prfaas-route"] == "remote:east"
    assert answer.headers["x-prfaas-route-reason"] == "above_threshold"
    [job] = prefill.jobs(PrefillJob)
    assert job.codec == "lossless"
    record: dict[str, Any] = await one.decision(answer.headers["x-request-id"])
    [attempt] = record["attempts"]
    assert attempt["kv_digest"] == "01" * 16
    assert (attempt["raw_bytes"], attempt["wire_bytes"]) == (RAW_BYTES, WIRE_BYTES)
    assert attempt["range"] == [0, len(job.token_ids) - 1]
    assert record["usage"]["completion_tokens"] == 3


async def test_a_one_token_prompt_needs_no_prefill_leg(stage: Open) -> None:
    one = await stage()
    prefill, decode = await one.pair()
    answer = await one.complete(prompt=[7])
    assert answer.status_code == 200
    assert answer.headers["x-prfaas-route-reason"] == "nothing_to_prefill"
    assert answer.headers["x-prfaas-prefill"] == "in-place"
    assert prefill.jobs(PrefillJob) == []
    [job] = decode.jobs(GenerateJob)
    assert (job.source, job.token_ids) == (None, (7,))


async def test_without_a_local_prefill_node_the_answer_says_that_it_was_prefilled_in_place(stage: Open) -> None:
    one = await stage()
    decode = await one.node("d", Role.DECODE)
    answer = await one.complete()
    assert answer.headers["x-prfaas-prefill"] == "in-place"
    assert answer.headers["x-prfaas-route-reason"] == "no_local_prefill_node"
    assert decode.jobs(GenerateJob)[0].source is None
    metrics = (await one.client.get("/metrics")).text
    assert "prfaas_in_place_prefills_total 1.0" in metrics


async def test_who_only_dials_is_told_whom_to_dial(stage: Open) -> None:
    one = await stage()
    prefill = await one.node("p", Role.PREFILL, kv=False)
    decode = await one.node("d", Role.DECODE)
    assert (await one.complete()).status_code == 200
    [job] = prefill.jobs(PrefillJob)
    assert (job.dial.node_id, job.dial.address) == ("d", decode.join.kv_address)
    assert job.dial.public_key == decode.join.public_key
    source = decode.jobs(GenerateJob)[0].source
    assert source.dial is None
    assert source.public_key == prefill.join.public_key


@pytest.mark.parametrize(("stage_name", "cause"), [("prefill", "engine_lost"), ("queue", "queue_full")])
async def test_a_failed_remote_prefill_cancels_decode_and_falls_back_home(
    stage: Open, stage_name: str, cause: str
) -> None:
    one = await stage()
    remote, decode = await one.pair("east", on_prefill=failing(stage_name, cause))
    local = await one.node("p-local", Role.PREFILL)
    answer = await one.complete(words=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prfaas-route"] == "local"
    assert answer.headers["x-prfaas-route-reason"] == "fallback"
    first, second = decode.jobs(GenerateJob)
    assert first.generation in decode.cancelled
    assert second.generation not in decode.cancelled
    [remote_job], [local_job] = remote.jobs(PrefillJob), local.jobs(PrefillJob)
    assert transfer_of(remote, remote_job.ticket) != transfer_of(local, local_job.ticket)
    assert local_job.priority > remote_job.priority
    record = await one.decision(answer.headers["x-request-id"])
    assert record["fallback"] is True
    assert [(a["outcome"], a["cause"]) for a in record["attempts"]] == [("failed", cause), ("finished", None)]
    metrics = (await one.client.get("/metrics")).text
    assert f'prfaas_attempt_failures_total{{cause="{cause}",stage="{stage_name}"}} 1.0' in metrics
    assert 'prfaas_fallbacks_total{outcome="local"} 1.0' in metrics


async def test_a_failed_decode_leg_cancels_the_prefill_leg_at_once(stage: Open) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)
    remote, _ = await one.pair("east", on_prefill=never, on_generate=failing("transfer", "peer_lost"))
    answer = await one.complete(words=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "peer_lost"
    [job] = remote.jobs(PrefillJob)
    await one.until(lambda: remote.cancelled == [transfer_of(remote, job.ticket).hex()])


async def test_policy_fail_answers_503_at_once_and_uses_no_local_node(stage: Open) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)
    await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    local = await one.node("p-local", Role.PREFILL)
    answer = await one.complete(words=60)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert local.jobs(PrefillJob) == []


async def test_beyond_the_fallback_budget_the_answer_is_503_with_retry_after(stage: Open) -> None:
    one = await stage()
    await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    local = await one.node("p-local", Role.PREFILL, speed=1.0)
    assert (await one.complete(words=60)).status_code == 200
    refused = await one.complete(words=60)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "fallback_budget_exhausted"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert len(local.jobs(PrefillJob)) == 1
    record = await one.decision(refused.headers["x-request-id"])
    assert record["outcome"] == "failed"
    assert len(record["attempts"]) == 1
    assert record["route"] == "remote:east"
    assert "remote:east" in refused.json()["error"]["message"]


async def test_when_the_fallback_fails_too_there_is_no_third_attempt(stage: Open) -> None:
    one = await stage()
    _, decode = await one.pair("east", on_generate=failing("decode", "engine_lost"))
    await one.node("p-local", Role.PREFILL)
    answer = await one.complete(words=60)
    assert answer.status_code == 503
    assert len(decode.jobs(GenerateJob)) == 2


async def test_a_failed_local_prefill_node_is_not_asked_again(stage: Open) -> None:
    one = await stage()
    bad, _ = await one.pair(on_prefill=failing("prefill", "engine_lost"))
    good = await one.node("p-zz", Role.PREFILL)
    assert (await one.complete()).status_code == 200
    assert len(bad.jobs(PrefillJob)) == 1
    assert len(good.jobs(PrefillJob)) == 1


async def test_a_late_remote_attempt_is_cancelled_and_prefilled_at_home(stage: Open) -> None:
    one = await stage()
    remote, decode = await one.pair("east")
    local = await one.node("p-local", Role.PREFILL)
    now = asyncio.get_running_loop().time()
    one.gateway.registry.link("east").observe(1000, 1e-6, 1e-6, now)  # fast: predicted TTFT is near zero
    remote.on_prefill = never
    decode.on_generate = answer_when_local
    one.gateway.registry.node("p-east").speed.observe(0, 10**9, 1.0)  # type: ignore[union-attr]
    began = time.monotonic()
    answer = await one.complete(words=60)
    took = time.monotonic() - began
    assert answer.headers["x-prfaas-route-reason"] == "fallback"
    assert 2.0 <= took < 3.5
    assert remote.cancelled == [transfer_of(remote, remote.jobs(PrefillJob)[0].ticket).hex()]
    assert len(local.jobs(PrefillJob)) == 1
    record = await one.decision(answer.headers["x-request-id"])
    assert record["attempts"][0]["outcome"] == "late"


async def test_an_unmeasured_way_is_late_only_at_the_deadline(stage: Open) -> None:
    one = await stage(request_timeout_s=2.6)
    remote, _ = await one.pair("east", on_prefill=never, on_generate=never)
    await one.node("p-local", Role.PREFILL)
    began = time.monotonic()
    answer = await one.complete(words=60)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    assert 2.5 <= time.monotonic() - began < 4.0
    await one.until(lambda: remote.cancelled)


async def test_both_legs_of_every_attempt_expire_with_the_request(stage: Open) -> None:
    one = await stage(request_timeout_s=7.0)
    remote, decode = await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    decode.on_generate = answer_when_local
    local = await one.node("p-local", Role.PREFILL)
    began = time.time()
    answer = await one.complete(words=60)
    assert answer.headers["x-prfaas-route"] == "local"
    jobs = [*remote.jobs(PrefillJob), *local.jobs(PrefillJob)]
    tickets = [verify_ticket(job.ticket, decode.welcome.ticket_key, began) for job in jobs]
    deadlines = [ticket.deadline for ticket in tickets] + [job.deadline for job in decode.jobs(GenerateJob)]
    assert len(deadlines) == 4
    assert all(began + 6.0 < deadline < began + 8.0 for deadline in deadlines)
    assert max(deadlines) - min(deadlines) < 0.1


async def test_a_prefill_node_whose_stream_closes_is_lost_at_once_and_its_request_goes_home(stage: Open) -> None:
    one = await stage()
    remote, decode = await one.pair("east", on_prefill=cut)
    decode.on_generate = answer_when_local
    local = await one.node("p-local", Role.PREFILL)
    began = time.monotonic()
    answer = await one.complete(words=60)
    assert answer.headers["x-prfaas-route"] == "local"
    assert time.monotonic() - began < 1.5
    assert one.gateway.registry.node("p-east") is None
    assert len(local.jobs(PrefillJob)) == 1
    assert len(remote.jobs(PrefillJob)) == 1
    record = await one.decision(answer.headers["x-request-id"])
    assert record["attempts"][0]["cause"] == "node_lost"


async def test_a_silent_node_is_lost_within_five_seconds(stage: Open) -> None:
    one = await stage()
    remote, decode = await one.pair("east", on_prefill=never)
    decode.on_generate = answer_when_local
    await one.node("p-local", Role.PREFILL)
    remote.beating = False
    began = time.monotonic()
    answer = await one.complete(words=60)
    assert answer.status_code == 200
    assert answer.headers["x-prfaas-route"] == "local"
    assert 2.5 <= time.monotonic() - began < 5.0
    assert one.gateway.registry.node("p-east") is None


async def test_losing_the_prefill_node_after_the_commit_does_not_matter(stage: Open) -> None:
    one = await stage()
    prefill, decode = await one.pair()

    async def lose_then_answer(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        await node.send(delta(job, 300, "a"))
        prefill.abort()
        await one.until(lambda: one.gateway.registry.node("p-local") is None)
        await node.send(delta(job, 301, "b"))
        await finish(node, job, tokens=2)

    decode.on_generate = lose_then_answer
    answer = await one.complete()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "ab"


async def test_a_decode_node_that_answers_without_having_received_the_kv_is_not_believed(stage: Open) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)

    async def recompute(node: FakeNode, job: GenerateJob) -> None:
        await node.send(delta(job, 300, "a"))

    await one.pair("east", on_prefill=never, on_generate=recompute)
    answer = await one.complete(words=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "protocol"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_cancels_both_legs(stage: Open, stream: bool) -> None:
    one = await stage()
    prefill, decode = await one.pair("east", on_prefill=never, on_generate=never)
    with pytest.raises(httpx.ReadTimeout):
        await one.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "ab " * 60, "stream": stream},
            headers={"x-request-id": "left"},
            timeout=0.5,
        )
    await one.until(lambda: prefill.cancelled and decode.cancelled)
    assert prefill.cancelled == [transfer_of(prefill, prefill.jobs(PrefillJob)[0].ticket).hex()]
    assert decode.cancelled == [decode.jobs(GenerateJob)[0].generation]
    record = await one.decision("left")
    assert record["outcome"] == "disconnected"
    metrics = (await one.client.get("/metrics")).text
    assert "prfaas_cancel_seconds_count 2.0" in metrics
    assert "prfaas_num_requests_running 0.0" in metrics


async def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_the_generation(stage: Open) -> None:
    one = await stage()

    async def drip(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        while True:
            await node.send(delta(job, 300, "x"))
            await asyncio.sleep(0.02)

    _, decode = await one.pair(on_generate=drip)
    body = {"model": "tiny", "prompt": "ab", "stream": True}
    async with one.client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await one.until(lambda: decode.cancelled)


async def test_after_the_first_token_a_failure_is_an_error_event_and_no_retry(stage: Open) -> None:
    one = await stage()

    async def break_off(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        await node.send(delta(job, 300, "half"))
        await asyncio.sleep(0.05)
        await failing("decode", "engine_lost")(node, job)

    _, decode = await one.pair(on_generate=break_off)
    answer = await one.complete(stream=True)
    assert answer.status_code == 200
    events = [line[6:] for line in answer.text.splitlines() if line]
    assert json.loads(events[0])["choices"][0]["text"] == "half"
    assert json.loads(events[-1])["error"]["code"] == "engine_lost"
    assert "[DONE]" not in answer.text
    assert len(decode.jobs(GenerateJob)) == 1
    whole = await one.complete()
    assert whole.status_code == 503
    assert len(decode.jobs(GenerateJob)) == 2


async def test_requests_that_share_an_id_run_apart_and_the_newest_is_explained(stage: Open) -> None:
    one = await stage()
    _, decode = await one.pair()
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(*(one.complete(headers=headers) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({job.generation for job in decode.jobs(GenerateJob)}) == 5
    assert len({answer.json()["id"] for answer in answers}) == 5
    record = await one.decision("same")
    assert record["request_id"] == "same"
    assert await one.decision(record["id"]) == record


async def test_nothing_can_be_generated_without_a_decode_node(stage: Open) -> None:
    one = await stage()
    answer = await one.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_node")
    assert (await one.client.get("/ready")).status_code == 503
    decode = await one.node("d", Role.DECODE)
    assert (await one.client.get("/ready")).status_code == 200
    await decode.heartbeat(accepting=False)
    decode.beating = False
    await one.until(lambda: not one.gateway.registry.node("d").accepting)  # type: ignore[union-attr]
    assert (await one.complete()).status_code == 503


async def test_a_full_fleet_refuses_more_where_nobody_may_wait_and_recovers(stage: Open) -> None:
    one = await stage(queue=0)
    release = asyncio.Event()

    async def wait_then_answer(node: FakeNode, job: GenerateJob) -> None:
        await release.wait()
        await answer_well(node, job)

    await one.node("d", Role.DECODE, max_queue=1, on_generate=wait_then_answer)
    first = asyncio.create_task(one.complete())
    await one.until(lambda: one.nodes[0].jobs(GenerateJob))
    crowded = await one.complete()
    assert (crowded.status_code, crowded.json()["error"]["code"]) == (503, "overloaded")
    assert crowded.headers["retry-after"]
    release.set()
    assert (await first).status_code == 200
    assert (await one.complete()).status_code == 200


async def test_hints_and_quality_in_the_headers(stage: Open) -> None:
    one = await stage()
    await one.pair("east")
    await one.node("p-local", Role.PREFILL)
    remote = await one.complete(headers={"x-prfaas-route-hint": "east", "x-prfaas-kv-quality": "exact"})
    assert (remote.headers["x-prfaas-route"], remote.headers["x-prfaas-route-reason"]) == ("remote:east", "hint")
    home = await one.complete(words=60, headers={"x-prfaas-route-hint": "local", "x-prfaas-kv-quality": "compact"})
    assert home.headers["x-prfaas-route"] == "local"
    for name, value in (("x-prfaas-route-hint", "nowhere"), ("x-prfaas-kv-quality", "best")):
        answer = await one.complete(headers={name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


async def test_a_drained_cluster_gets_no_new_work_until_it_is_resumed(stage: Open) -> None:
    one = await stage()
    await one.pair("east")
    await one.node("p-local", Role.PREFILL)
    for action, route in (("drain", "local"), ("resume", "remote:east")):
        assert (await one.client.post(f"/v1/clusters/east/{action}")).status_code == 200
        assert (await one.complete(words=60)).headers["x-prfaas-route"] == route


async def test_removing_a_cluster_dismisses_its_nodes_and_its_requests_go_home(stage: Open) -> None:
    one = await stage()
    remote, decode = await one.pair("east", on_prefill=never)
    decode.on_generate = answer_when_local
    await one.node("p-local", Role.PREFILL)
    pending = asyncio.create_task(one.complete(words=60))
    await one.until(lambda: remote.jobs(PrefillJob))
    assert (await one.client.delete("/v1/clusters/east")).status_code == 200
    assert (await pending).headers["x-prfaas-route"] == "local"
    await one.until(lambda: remote.refused is not None)
    again = await one.node("p-east", Role.PREFILL, cluster="east")
    assert again.refused is not None
    assert (again.refused.field, "removed" in again.refused.reason) == ("cluster", True)


async def answer_when_local(node: FakeNode, job: GenerateJob) -> None:
    """Speak only for a job whose KV comes from the local prefill node."""
    assert job.source is not None
    if job.source.node_id == "p-local":
        await answer_well(node, job)


async def cut(node: FakeNode, job: PrefillJob) -> None:
    node.abort()


@pytest.mark.parametrize(
    "figures",
    [
        {"raw_bytes": 0},
        {"raw_bytes": -5},
        {"raw_bytes": 1 << 40},
        {"wire_bytes": -1},
        {"transfer_s": float("nan")},
        {"exposed_s": float("inf")},
        {"transfer_s": -1.0},
    ],
)
async def test_figures_that_no_transfer_can_have_end_the_attempt(stage: Open, figures: dict[str, Any]) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)

    async def boast(node: FakeNode, job: GenerateJob) -> None:
        assert job.source is not None
        good = TransferDone(transfer_of(node, job.source.ticket), 256, 128, "raw", 0.1, 0.1, b"")
        await node.send(msgspec.structs.replace(good, **figures))
        await node.send(delta(job, 300, "a"))

    await one.pair(on_generate=boast)
    answer = await one.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "protocol")
    assert one.gateway.registry.link("local").bytes_per_s is None


async def test_what_a_node_says_of_a_failure_reaches_operators_but_not_clients_or_labels(stage: Open) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)
    await one.node("d", Role.DECODE, on_generate=failing("decode", "Bad\nCause 10.0.0.7"))
    answer = await one.complete()
    assert answer.json()["error"]["code"] == "other"
    assert "10.0.0.7" not in answer.text
    assert "scripted" not in answer.text
    record = await one.decision(answer.headers["x-request-id"])
    assert record["attempts"][0]["detail"] == "scripted"
    assert 'cause="other",stage="decode"' in (await one.client.get("/metrics")).text


async def test_the_speed_is_learnt_from_a_prefill_that_is_reported_after_its_answer_has_ended(stage: Open) -> None:
    one = await stage()
    ended = asyncio.Event()

    async def report_late(node: FakeNode, job: PrefillJob) -> None:
        await ended.wait()
        await node.send(PrefillDone(transfer_of(node, job.ticket), 0.001, len(job.token_ids) - 1))

    await one.pair(on_prefill=report_late)
    assert (await one.complete(words=300)).status_code == 200
    session = one.gateway.registry.node("p-local")
    assert session is not None
    assert session.speed.tokens_per_s == 1000.0
    ended.set()
    await one.until(lambda: (session.speed.tokens_per_s or 0.0) > 1000.0)
