"""What nodes say they hold decides where a prompt goes, what is sent, and what happens where it was not so."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
from click.testing import CliRunner

from gateway.commands.operate import status
from kvcache.blocks import BLOCK_TOKENS
from kvcache.control import Finished, GenerateJob, KvEvents, PrefillJob
from kvcache.hashing import block_hashes
from kvcache.kv_events import BlockStored, EventBatch, encode_batch
from kvcache.ticket import verify_ticket
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, answer_well, failing

IDS = [4 + at % 500 for at in range(4 * BLOCK_TOKENS + 10)]
LONGER = [*IDS, *range(4, 4 + BLOCK_TOKENS)]


def stored(stage: Stage, blocks: int) -> KvEvents:
    """A node's first batch: it holds the beginning of ``IDS``."""
    fingerprint = stage.gateway.registry._fingerprint.digest()
    names = block_hashes(IDS, BLOCK_TOKENS, fingerprint=fingerprint, salt="")[:blocks]
    ids = tuple(IDS[: blocks * BLOCK_TOKENS])
    event = BlockStored(
        tuple(names), None, ids, BLOCK_TOKENS, None, "CPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
    )
    return KvEvents(0, encode_batch(EventBatch(1.0, (event,))))


async def says(stage: Stage, node: FakeNode, blocks: int) -> None:
    before = stage.gateway.kv_index.figures.batches
    await node.send(stored(stage, blocks))
    await stage.until(lambda: stage.gateway.kv_index.figures.batches > before)


async def facts(stage: Stage, answer: httpx.Response) -> dict[str, tuple[int, int]]:
    record = await stage.decision(answer.headers["x-request-id"])
    found = record["decision"]["facts"]
    nodes = [*found["decode_nodes"], *(one for cluster in found["clusters"] for one in cluster["nodes"])]
    return {one["node_id"]: (one["held_tokens"], one["cached_tokens"]) for one in nodes}


def sent_range(node: FakeNode, job: PrefillJob) -> tuple[int, int]:
    assert node.welcome is not None
    ticket = verify_ticket(job.ticket, node.welcome.ticket_key, time.time())
    return ticket.start, ticket.stop


async def two_nodes(stage: Stage, **options: Any) -> tuple[FakeNode, FakeNode]:
    stage.register("east")
    prefill = await stage.node("p", Role.PREFILL, cluster="east", kv_events=True)
    return prefill, await stage.node("d", Role.DECODE, kv_events=True, **options)


async def test_what_nodes_say_they_hold_is_in_the_facts_and_is_not_sent_again(stage: Open) -> None:
    one = await stage()
    prefill, decode = await two_nodes(one)
    await says(one, prefill, 3)
    await says(one, decode, 2)
    answer = await one.complete(prompt=IDS, headers={"x-prfaas-route-hint": "remote"})
    assert answer.status_code == 200, answer.text
    assert await facts(one, answer) == {"p": (192, 192), "d": (128, 128)}
    (job,) = prefill.jobs(PrefillJob)
    assert sent_range(prefill, job) == (128, len(IDS) - 1)


async def test_a_prefix_that_is_gone_is_sent_whole_at_once_and_is_no_fallback(stage: Open) -> None:
    async def gone_once(node: FakeNode, job: GenerateJob) -> None:
        first = len(node.jobs(GenerateJob)) == 1
        await (failing("transfer", "prefix_gone") if first else answer_well)(node, job)

    one = await stage()
    prefill, decode = await two_nodes(one, on_generate=gone_once)
    await says(one, decode, 4)
    answer = await one.complete(prompt=LONGER, headers={"x-prfaas-route-hint": "remote"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prfaas-route"] == "remote:east"
    starts = [sent_range(prefill, job)[0] for job in prefill.jobs(PrefillJob)]
    assert starts == [256, 0]
    record = await one.decision(answer.headers["x-request-id"])
    assert record["fallback"] is False
    assert record["fallback_decision"] is None
    assert [attempt["cause"] for attempt in record["attempts"]] == ["prefix_gone", None]
    metrics = (await one.client.get("/metrics")).text
    assert 'prfaas_attempt_failures_total{cause="prefix_gone",stage="transfer"} 1.0' in metrics
    assert "prfaas_fallbacks_total{" not in metrics


async def test_a_prefix_that_is_gone_again_is_a_failure_like_any(stage: Open) -> None:
    one = await stage()
    _, decode = await two_nodes(one, on_generate=failing("transfer", "prefix_gone"))
    await says(one, decode, 4)
    answer = await one.complete(prompt=LONGER, headers={"x-prfaas-route-hint": "remote"})
    assert answer.status_code == 503
    record = await one.decision(answer.headers["x-request-id"])
    assert record["fallback"] is True
    assert len(decode.jobs(GenerateJob)) == 3


async def test_a_node_without_events_is_thought_to_keep_what_it_was_sent_but_a_transfer_leaves_nothing_out(
    stage: Open,
) -> None:
    one = await stage()
    await one.pair("east")
    for _ in range(2):
        answer = await one.complete(prompt=IDS, headers={"x-prfaas-route-hint": "remote"})
        assert answer.status_code == 200, answer.text
    assert await facts(one, answer) == {"p-east": (256, 256), "d": (0, 256)}


async def test_another_count_of_prompt_tokens_is_counted_and_switches_affinity_off(stage: Open) -> None:
    async def miscounts(node: FakeNode, job: GenerateJob) -> None:
        await node.send(Finished(job.generation, "stop", len(job.token_ids) + 1, 0, 0))

    one = await stage()
    decode = await one.node("d", Role.DECODE, kv_events=True, on_generate=miscounts)
    await says(one, decode, 4)
    first = await one.complete(prompt=IDS)
    assert (await facts(one, first))["d"] == (256, 256)
    second = await one.complete(prompt=IDS)
    assert (await facts(one, second))["d"] == (0, 0)
    assert "prfaas_usage_differs_total 2.0" in (await one.client.get("/metrics")).text
    assert (await one.client.get("/v1/status")).json()["prefix_index"]["affinity"] is False


async def test_the_index_is_shown_in_status_and_metrics(stage: Open) -> None:
    one = await stage()
    decode = await one.node("d", Role.DECODE, kv_events=True)
    await says(one, decode, 4)
    await one.complete(prompt=IDS)
    found = (await one.client.get("/v1/status")).json()["prefix_index"]
    assert (found["blocks"], found["hit_share"], found["lookups"], found["hits"]) == (4, 1.0, 1, 1)
    assert found["nodes"] == {"d": {"applied_seq": 0, "orphans": 0, "unreadable": 0}}
    metrics = (await one.client.get("/metrics")).text
    for line in ("blocks 4.0", "events_total 1.0", "gaps_total 0.0"):
        assert f"prfaas_kv_cache_index_{line}" in metrics
    shown = await asyncio.to_thread(CliRunner().invoke, status, ["--gateway", one.url])
    assert "prefix index 4 blocks" in shown.output
    assert "100% of tokens held" in shown.output
