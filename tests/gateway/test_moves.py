"""A prefix cached in another cluster is sent ahead of the prefill; whatever becomes of it, the request goes on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gateway.clusters import Dial
from kvcache.control import (
    Failed,
    GenerateJob,
    PrefillDone,
    PrefillJob,
    PrefillStarted,
    SharePrefix,
    TakePrefix,
    TransferDone,
)
from kvcache.ticket import Ticket, verify_ticket
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import RAW_BYTES, WIRE_BYTES, FakeNode, Script, failing, never, transfer_of
from tests.gateway.test_prefixes import IDS, says

KEPT = 256


async def goes_on_from_there(node: FakeNode, job: PrefillJob) -> None:
    """A prefill of which the moved tokens need no computing."""
    transfer = transfer_of(node, job.ticket)
    await node.send(PrefillStarted(transfer, KEPT))
    await node.send(PrefillDone(transfer, 0.01, len(IDS) - 1 - KEPT, KEPT))


@dataclass
class Cast:
    """East keeps what a prompt begins with, and its link is fast and idle; home keeps nothing."""

    stage: Stage
    source: FakeNode
    target: FakeNode
    decode: FakeNode
    hint: str = "local"

    async def ask(self) -> tuple[httpx.Response, dict[str, Any]]:
        """The answer, and the record of its one attempt."""
        answer = await self.stage.complete(prompt=IDS, headers={"x-prfaas-route-hint": self.hint})
        assert answer.status_code == 200, answer.text
        record = await self.stage.decision(answer.headers["x-request-id"])
        assert record["fallback"] is False
        [attempt] = record["attempts"]
        assert attempt["prefill_node"] == self.target.name
        return answer, attempt

    def ticket(self, data: bytes) -> Ticket:
        assert self.source.welcome is not None
        return verify_ticket(data, self.source.welcome.ticket_key, time.time())


def quick_ways(stage: Stage) -> None:
    """All ways were seen to do 1 GB/s, and are idle."""
    registry, now = stage.gateway.registry, asyncio.get_running_loop().time()
    for link in (registry.link("local"), registry.link("east"), registry.outward("east")):
        link.observe(10**9, 1.0, 1.0, now)
        link.reported("p", {}, now)


async def cast(stage: Open, *, outwards: bool = False, moves: bool = True, **scripts: Script) -> Cast:
    one = await stage()
    one.register("east")
    roles: dict[str, dict[str, Any]] = {
        "source": {"on_share": scripts.get("on_share")},
        "target": {"on_take": scripts.get("on_take"), "on_prefill": scripts.get("on_prefill", goes_on_from_there)},
    }
    clusters = ("local", "east") if outwards else ("east", "local")
    source, target = [
        await one.node(f"p-{name}", Role.PREFILL, cluster=name, kv_events=True, moves=moves, **options)
        for name, options in zip(clusters, roles.values(), strict=True)
    ]
    decode = await one.node("d", Role.DECODE, on_generate=scripts.get("on_generate"))
    quick_ways(one)
    await says(one, source, KEPT // 64)
    return Cast(one, source, target, decode, "remote" if outwards else "local")


@pytest.mark.parametrize("outwards", [False, True])
async def test_the_prefix_is_there_before_the_prefill_begins_and_counts_as_cached(stage: Open, outwards: bool) -> None:
    seen: list[str] = []

    async def noting(node: FakeNode, order: TakePrefix) -> None:
        seen.extend(type(each).__name__ for each in (*node.jobs(PrefillJob), *it.decode.jobs(GenerateJob)))
        await asyncio.sleep(0.1)
        transfer = transfer_of(node, order.source.ticket)
        await node.send(TransferDone(transfer, RAW_BYTES, WIRE_BYTES, "raw", 0.02, 0.01, b"\x02" * 16))

    it = await cast(stage, outwards=outwards, on_take=noting)
    answer, attempt = await it.ask()
    assert seen == [], "nothing begins before"
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": KEPT}
    move = attempt["move"]
    assert (move["source_node"], move["range"], move["outcome"]) == (it.source.name, [0, KEPT], "moved")
    assert (move["raw_bytes"], move["wire_bytes"], move["codec"]) == (RAW_BYTES, WIRE_BYTES, "raw")
    assert 0.1 <= move["seconds"] < 1.0
    [share], [take] = it.source.jobs(SharePrefix), it.target.jobs(TakePrefix)
    assert share.ticket == take.source.ticket
    ticket = it.ticket(share.ticket)
    assert (ticket.start, ticket.stop) == (0, KEPT)
    assert take.token_ids == share.token_ids == tuple(IDS[:KEPT])
    assert take.source.dial == it.source.join.kv_address
    assert it.source.cancelled == it.target.cancelled == []
    metrics = (await it.stage.client.get("/metrics")).text
    assert 'prfaas_prefix_moves_total{outcome="moved"} 1.0' in metrics
    assert f"prfaas_prefix_move_bytes_total {float(WIRE_BYTES)}" in metrics
    report = (await it.stage.client.get("/v1/reports/rebalancing?format=json")).json()
    sent = {one["name"]: round(one["gigabytes"] * 1e9) for one in report["egress"]["clusters"]}
    assert sent[it.source.join.cluster] == WIRE_BYTES, "what the prefill sent counts where it was"


@pytest.mark.parametrize("side", ["on_share", "on_take"])
async def test_a_move_that_fails_is_no_failure_of_the_request(stage: Open, side: str) -> None:
    scripts = {"on_share": never, "on_take": never, side: failing("transfer", "prefix_gone")}
    it = await cast(stage, **scripts)
    began = time.monotonic()
    _, attempt = await it.ask()
    assert time.monotonic() - began < 0.8, "nobody waits for what is not coming"
    assert (attempt["move"]["outcome"], attempt["move"]["cause"]) == ("failed", "prefix_gone")
    assert attempt["cause"] is None
    other = it.target if side == "on_share" else it.source
    await it.stage.until(lambda: other.cancelled)


async def test_a_move_that_is_late_is_given_up_on_both_nodes(stage: Open) -> None:
    it = await cast(stage, on_share=never, on_take=never)
    _, attempt = await it.ask()
    assert attempt["move"]["outcome"] == "late"
    assert 1.0 <= attempt["move"]["seconds"] < 2.0
    job = attempt["move"]["transfer"]
    await it.stage.until(lambda: job in it.source.cancelled and job in it.target.cancelled)


@pytest.mark.parametrize("what", ["inexact", "too_much", "out_of_turn"])
async def test_what_a_move_cannot_have_been_is_not_believed(stage: Open, what: str) -> None:
    async def lie(node: FakeNode, order: TakePrefix) -> None:
        transfer = transfer_of(node, order.source.ticket)
        codec, nbytes = ("int8", RAW_BYTES) if what == "inexact" else ("raw", 10**12)
        done = TransferDone(transfer, nbytes, nbytes, codec, 0.02, 0.01, b"\x02" * 16)
        await node.send(PrefillStarted(transfer) if what == "out_of_turn" else done)

    it = await cast(stage, on_take=lie)
    _, attempt = await it.ask()
    assert (attempt["move"]["outcome"], attempt["move"]["cause"]) == ("failed", "protocol")


async def test_a_source_that_is_killed_in_a_move_is_not_waited_for(stage: Open) -> None:
    it = await cast(stage, on_share=never, on_take=never)
    asked = asyncio.create_task(it.ask())
    await it.stage.until(lambda: it.source.jobs(SharePrefix))
    it.source.abort()
    _, attempt = await asked
    assert (attempt["move"]["cause"], attempt["move"]["failed_node"]) == ("node_lost", "p-east")


async def test_a_decode_node_that_is_lost_in_a_move_ends_the_attempt_and_the_move(stage: Open) -> None:
    it = await cast(stage, on_share=never, on_take=never)
    asked = asyncio.create_task(it.stage.complete(prompt=IDS, headers={"x-prfaas-route-hint": "local"}))
    await it.stage.until(lambda: it.target.jobs(TakePrefix))
    it.decode.abort()
    assert (await asked).status_code == 503
    await it.stage.until(lambda: it.source.cancelled and it.target.cancelled)
    assert not it.target.jobs(PrefillJob)


async def test_a_client_that_leaves_in_a_move_ends_it_and_nothing_else_begins(stage: Open) -> None:
    it = await cast(stage, on_share=never, on_take=never)
    asked = asyncio.create_task(it.stage.complete(prompt=IDS, headers={"x-prfaas-route-hint": "local"}))
    await it.stage.until(lambda: it.target.jobs(TakePrefix))
    asked.cancel()
    await it.stage.until(lambda: it.source.cancelled and it.target.cancelled)
    await asyncio.sleep(0.1)
    assert not it.target.jobs(PrefillJob)
    assert not it.decode.jobs(GenerateJob)


async def test_nodes_that_do_not_know_moves_are_not_asked(stage: Open) -> None:
    it = await cast(stage, moves=False)
    answer, attempt = await it.ask()
    assert "move" not in attempt
    record = await it.stage.decision(answer.headers["x-request-id"])
    assert record["decision"]["facts"]["can_move"] is False


@pytest.mark.parametrize("home_accepts", [True, False])
async def test_a_source_that_only_dials_is_told_whom(stage: Open, home_accepts: bool) -> None:
    one = await stage()
    one.gateway.registry.register("east", Dial.OUT)
    common: dict[str, Any] = {"kv_events": True, "moves": True}
    source = await one.node("p-east", Role.PREFILL, cluster="east", kv=False, **common)
    target = await one.node("p-local", Role.PREFILL, kv=home_accepts, on_prefill=goes_on_from_there, **common)
    decode = await one.node("d", Role.DECODE)
    quick_ways(one)
    await says(one, source, KEPT // 64)
    it = Cast(one, source, target, decode)
    _, attempt = await it.ask()
    assert ("move" in attempt) is home_accepts, "two that only dial cannot meet"
    if home_accepts:
        [share], [take] = source.jobs(SharePrefix), target.jobs(TakePrefix)
        assert share.dial is not None
        assert (share.dial.node_id, share.dial.address) == ("p-local", target.join.kv_address)
        assert take.source.dial is None


async def test_a_nodes_refusal_ends_the_move_and_only_plain_words_of_it_are_kept(stage: Open) -> None:
    async def gives_up(node: FakeNode, order: SharePrefix) -> None:
        await node.send(Failed(transfer_of(node, order.ticket).hex(), "Queue!", "draining", "takes no new jobs"))

    it = await cast(stage, on_share=gives_up, on_take=never)
    _, attempt = await it.ask()
    assert (attempt["move"]["stage"], attempt["move"]["cause"]) == ("other", "draining")
