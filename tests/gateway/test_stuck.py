"""A remote node that takes jobs and does none of them is given up; one that is slow, or waits for others, is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from gateway import stuck
from gateway.breakers import Breakers
from gateway.sessions import NodeSession
from kvcache.control import (
    Cancelled,
    Failed,
    GenerateJob,
    Heartbeat,
    Join,
    LinkReport,
    ModelInfo,
    PrefillDone,
    PrefillJob,
    PrefillStarted,
)
from kvcache.wire import Role
from scheduler.breaker import BreakerState, BreakerValues
from scheduler.links import LinkState, PathReport
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, answer_well, never, transfer_of
from tests.gateway.test_breakers import LONG, answer_unless_from

LEAST_S = 0.6


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.progress.LEAST_S", LEAST_S)


def knows_the_link(one: Stage, cluster: str = "east") -> None:
    """So that times can be predicted."""
    one.gateway.registry.link(cluster).observe(10**9, 1.0, 1.0, asyncio.get_running_loop().time())


async def only_begin(node: FakeNode, job: PrefillJob) -> None:
    """As a node does whose engine hangs: it finds room for whatever comes."""
    await node.send(PrefillStarted(transfer_of(node, job.ticket)))


async def test_a_node_that_does_nothing_is_given_up_and_what_it_had_is_answered_from_home(
    stage: Open, impatient: None
) -> None:
    one = await stage()
    await one.pair("east", on_prefill=only_begin, on_generate=answer_unless_from("p-east"))
    await one.node("p-home", Role.PREFILL)
    knows_the_link(one)
    answer = await one.complete(words=LONG)
    assert (answer.status_code, answer.headers["x-prfaas-route"]) == (200, "local")
    record = await one.decision(answer.headers["x-request-id"])
    assert [(each["stage"], each["cause"]) for each in record["attempts"]] == [("prefill", "stuck"), (None, None)]
    assert record["ttft_s"] < 2.0, "no whole lateness was waited for"
    after = await one.complete(words=LONG)
    assert after.headers["x-prfaas-route-reason"] == "breaker_open"


async def test_jobs_that_keep_coming_and_are_begun_are_no_work(stage: Open, impatient: None) -> None:
    one = await stage()
    one.register("east")
    await one.node("p-east", Role.PREFILL, cluster="east", on_prefill=only_begin, max_queue=64)
    await one.node("d", Role.DECODE, on_generate=answer_unless_from("p-east"), max_queue=64)
    await one.node("p-home", Role.PREFILL)
    knows_the_link(one)
    session = one.gateway.registry.node("p-east")
    assert session is not None
    breaker, came = one.gateway.registry.breakers.node(session), []
    for _ in range(20):
        came.append(asyncio.create_task(one.complete(words=LONG, headers={"x-prfaas-route-hint": "remote"})))
        await asyncio.sleep(0.1)
        if breaker.opened:
            break
    assert breaker.opened
    await asyncio.gather(*came)


async def test_its_neighbour_goes_on_and_gets_its_jobs(stage: Open, impatient: None) -> None:
    one = await stage()
    await one.pair("east", on_prefill=never, on_generate=answer_unless_from("p-east"))
    other = await one.node("p-other", Role.PREFILL, cluster="east")
    await one.node("p-home", Role.PREFILL)
    knows_the_link(one)
    answer = await one.complete(words=LONG)
    assert answer.headers["x-prfaas-route"] == "remote:east"
    record = await one.decision(answer.headers["x-request-id"])
    assert [each["prefill_node"] for each in record["attempts"]] == ["p-east", "p-other"]
    assert len(other.jobs(PrefillJob)) == 1


async def test_a_node_that_is_slow_and_shows_it_is_left_to_finish(stage: Open, impatient: None) -> None:
    one = await stage()

    async def slowly(node: FakeNode, job: PrefillJob) -> None:
        """Five times what was predicted and more; some KV leaves in every beat."""
        transfer = transfer_of(node, job.ticket)
        await node.send(PrefillStarted(transfer))
        for beat in range(1, 8):
            node.links = (LinkReport("d", 0.01, 0.0, 0, 0, 0, connections=1, bytes_acked=1000 * beat),)
            await asyncio.sleep(0.2)
        await node.send(PrefillDone(transfer, 1.4, len(job.token_ids) - 1))
        done.set()

    async def answer_when_done(node: FakeNode, job: GenerateJob) -> None:
        await done.wait()
        await answer_well(node, job)

    done = asyncio.Event()
    await one.pair("east", on_prefill=slowly, on_generate=answer_when_done)
    await one.node("p-home", Role.PREFILL)
    knows_the_link(one)
    answer = await one.complete(words=LONG)
    assert (answer.status_code, answer.headers["x-prfaas-route"]) == (200, "remote:east")
    assert len((await one.decision(answer.headers["x-request-id"]))["attempts"]) == 1


# ---- without a gateway


class Owner:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_message(self, node: NodeSession, message: Any) -> None:
        self.heard.append(message)

    def on_node_lost(self, node: NodeSession, cause: str) -> None:
        """Nothing is lost here."""


BEAT = Heartbeat(
    accepting=True,
    queued_jobs=0,
    queued_tokens=0,
    running=0,
    pages_total=10,
    pages_free=10,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=0.0,
    open_transfers=1,
)


def silent(cluster: str = "east") -> tuple[Any, NodeSession, Owner]:
    """A node that was given a job of a second ten seconds ago."""
    model = ModelInfo("tiny", {}, 1024, 256, 512)
    session = NodeSession(Join("p", "one", cluster, Role.PREFILL, b"k" * 32, None, model, "1", 8, ()), 0.0)
    links = {"east": LinkState(), "local": LinkState()}
    registry = SimpleNamespace(local_cluster="local", link=links.__getitem__, breakers=Breakers(BreakerValues()))
    owner = Owner()
    session.jobs["a"] = owner
    session.prefilling.sent("a", 0, 1000, 0)
    session.progress.begin("a", 1.0, 0.1, 0.0)
    return registry, session, owner


def gave_up(registry: Any, session: NodeSession, beat: Heartbeat, at: float = 10.0) -> bool:
    session.heartbeat = beat
    stuck.heard(registry, session, at)
    return bool(registry.breakers.node(session).state(at) is BreakerState.OPEN)


def test_silence_opens_the_breaker_once_and_fails_each_job() -> None:
    registry, session, owner = silent()
    assert gave_up(registry, session, BEAT)
    [failed] = owner.heard
    assert isinstance(failed, Failed)
    assert (failed.job, failed.stage, failed.cause) == ("a", "prefill", "stuck")
    gave_up(registry, session, BEAT, at=10.2)
    assert registry.breakers.node(session).opened == 1


def test_what_was_computed_of_a_job_that_was_called_back_is_a_sign_and_what_was_cached_is_none() -> None:
    for computed, works in ((700, True), (300, False), (0, False)):
        registry, session, _ = silent()
        session.progress.begin("b", 1.0, 0.1, 0.0)
        session.cancel("a", 9.0, cached_tokens=300)
        session.progress.end("a", 9.0)
        assert session.cancelled(Cancelled("a", computed), 9.5) == 0.5
        assert gave_up(registry, session, BEAT) is not works


def test_a_node_at_home_is_not_judged() -> None:
    assert not gave_up(*silent("local")[:2], BEAT)


def test_what_waits_for_room_that_others_hold_is_not_its_fault_nor_is_what_came_before_that_ended() -> None:
    registry, session, _ = silent()
    assert not gave_up(registry, session, structs.replace(BEAT, queued_jobs=1, open_transfers=3))
    assert not gave_up(registry, session, BEAT, at=14.0)
    assert gave_up(registry, session, BEAT, at=15.5)


def test_a_node_whose_jobs_all_wait_holds_the_room_itself() -> None:
    registry, session, _ = silent()
    assert gave_up(registry, session, structs.replace(BEAT, queued_jobs=2, open_transfers=2))


def test_nothing_moves_over_a_dead_link_whoever_sends() -> None:
    registry, session, _ = silent()
    registry.link("east").reported("p", {"d": PathReport(0.01, stalled_s=3.0)}, 9.9)
    assert not gave_up(registry, session, BEAT)
