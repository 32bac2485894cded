"""Only the holder of a ticket, and only once, may take a transfer."""

import asyncio
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache.control import Failed, Finished
from kvcache.wire import Abort, Ack, Announce, Grant, Open
from prefill_service.used import UsedTransfers
from tests.pair import pair
from tests.rogue import Rogue


async def test_a_job_with_a_forged_ticket_is_refused(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(ticket_key=Ed25519PrivateKey.generate())
        nodes.start(job)
        for side, name in ((nodes.prefill, job.transfer), (nodes.decode, job.generation)):
            failed = await side.ended(name)
            assert isinstance(failed, Failed)
            assert (failed.stage, failed.cause) == ("queue", "bad_ticket")
            assert "signature" in failed.detail
        assert nodes.prefill.serving.refused_tickets == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill_node": "north"}, "prefill_node"),
        ({"prefill_incarnation": "east-0"}, "prefill_incarnation"),
        ({"fingerprint": "0" * 32}, "fingerprint"),
        ({"chunk_tokens": 64}, "chunk_tokens"),
        ({"issued": time.time() - 60, "deadline": time.time() - 30}, "deadline"),
    ],
)
async def test_a_ticket_for_another_node_model_or_time_is_refused_naming_the_field(tokenizer, changes, field):
    async with pair(tokenizer) as nodes:
        job = nodes.job(**changes)
        nodes.prefill.serving.accept(job.prefill)
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("queue", "bad_ticket")
        assert f"ticket {field}" in failed.detail


async def test_a_transfer_larger_than_its_ticket_allows_is_refused(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(byte_cap=1000)
        nodes.start(job)
        failed = await nodes.prefill.ended(job.transfer)
        assert failed.cause == "bad_ticket"
        assert "byte_cap" in failed.detail
        assert nodes.prefill.engine.prefilled == []
        assert (await nodes.decode.ended(job.generation)).cause == "bad_ticket"


async def test_nobody_is_trusted_before_the_gateway_named_its_key(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        nodes.prefill.serving.leave("", "gateway_lost", "it went away")
        nodes.prefill.serving.accept(job.prefill)
        assert (await nodes.prefill.ended(job.transfer)).cause == "bad_ticket"


async def test_each_gateway_has_a_key_of_its_own_and_hears_of_its_own_jobs_alone(tokenizer):
    async with pair(tokenizer) as nodes:
        other, heard = Ed25519PrivateKey.generate(), {"a": [], "b": []}
        for side in (nodes.prefill, nodes.decode):
            for name, key in (("a", nodes.gateway_key), ("b", other)):
                services = (side.serving, side.asking)
                for service in services:
                    service.trust(key.public_key().public_bytes_raw(), name, heard[name].append)
        mine, theirs, forged = nodes.job(), nodes.job(ticket_key=other), nodes.job(ticket_key=other)
        for job, name in ((mine, "a"), (theirs, "b"), (forged, "a")):
            nodes.prefill.serving.accept(job.prefill, name)
            nodes.decode.asking.accept(job.generate, name)

        def finished(name, job):
            return [m for m in heard[name] if isinstance(m, Finished) and m.generation == job.generation]

        await nodes.decode.until(lambda: finished("a", mine) and finished("b", theirs))
        assert not finished("b", mine)
        assert not finished("a", theirs)
        refused = {m.job for m in heard["a"] if isinstance(m, Failed) and m.cause == "bad_ticket"}
        assert refused == {forged.transfer, forged.generation}


async def test_a_gateway_that_goes_takes_its_own_jobs_with_it_and_no_others(tokenizer):
    async with pair(tokenizer) as nodes:
        serving, heard = nodes.prefill.serving, {"a": [], "b": []}
        for name in heard:
            serving.trust(nodes.gateway_key.public_key().public_bytes_raw(), name, heard[name].append)
        jobs = {name: nodes.job() for name in heard}
        for name, job in jobs.items():
            serving.accept(job.prefill, name)
        assert serving.at_hand("a")[0] == serving.at_hand("b")[0] == 1
        serving.leave("a", "gateway_lost", "it went away")
        await nodes.prefill.until(lambda: serving.at_hand("b")[0] == 0)
        assert serving.at_hand("a")[0] == 1
        assert [m.cause for m in heard["a"] if isinstance(m, Failed)] == ["gateway_lost"]
        assert not [m for m in heard["b"] if isinstance(m, Failed)]
        serving.leave("b", "gateway_lost", "it went away")


async def test_another_nodes_ticket_is_of_no_use_and_its_owner_is_not_disturbed(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("thief", "thief-1") as thief:
        nodes.prefill.engine.hold_at = 1
        job = nodes.job()
        peer = await thief.dial(nodes.prefill)
        nodes.prefill.serving.accept(job.prefill)
        peer.send(Open(job.prefill.ticket, ("raw",)))
        abort = await thief.hears(Abort)
        assert abort.reason == "bad_ticket"
        assert "decode_key" in abort.detail
        assert nodes.prefill.serving.refused_tickets == 1
        nodes.decode.asking.accept(job.generate)
        await nodes.decode.until(lambda: job.ticket.transfer in nodes.decode.asking._by_transfer)
        await nodes.prefill.until(lambda: nodes.prefill.serving._exports[job.ticket.transfer].peer is not None)
        for frame in (
            Grant(job.ticket.transfer),
            Abort(job.ticket.transfer, "mine"),
            Ack(job.ticket.transfer, 0, True),
        ):
            peer.send(frame)
        await asyncio.sleep(0.05)
        nodes.prefill.engine.gate.set()
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        assert not [frame for frame in thief.heard if isinstance(frame, Announce)]


async def test_a_repeated_job_changes_nothing_and_one_that_is_over_is_refused(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine.hold_at = 1
        job = nodes.job()
        nodes.start(job)
        nodes.start(job)
        nodes.prefill.engine.gate.set()
        await nodes.prefill.until(lambda: nodes.prefill.engine.jobs)
        nodes.start(job)
        nodes.prefill.engine.hold_at = None
        nodes.prefill.engine.gate.set()
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        await nodes.idle()
        assert len(nodes.prefill.engine.prefilled) == 1
        assert not [m for m in nodes.prefill.reports if isinstance(m, Failed)]
        nodes.prefill.serving.accept(job.prefill)
        assert (await nodes.prefill.ended(job.transfer)).cause == "ticket_used"


async def test_a_used_ticket_opens_nothing_even_for_its_owner(tokenizer, caplog):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        nodes.start(job)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        await nodes.idle()
        async with Rogue("west-again", "1", nodes.decode.key) as again:
            (await again.dial(nodes.prefill)).send(Open(job.prefill.ticket, ("raw",)))
            assert (await again.hears(Abort)).reason == "ticket_used"
        assert "open refused peer=west-again" in caplog.text
        assert nodes.prefill.serving.refused_tickets == 1


async def test_an_open_may_come_before_its_job(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        nodes.decode.asking.accept(job.generate)
        await nodes.prefill.until(lambda: job.ticket.transfer in nodes.prefill.serving._early)
        nodes.prefill.serving.accept(job.prefill)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_an_open_waits_for_its_job_two_seconds_and_no_longer(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        begun = time.monotonic()
        nodes.decode.asking.accept(job.generate)
        failed = await nodes.decode.ended(job.generation)
        assert 1.9 < time.monotonic() - begun < 3.0
        assert (failed.stage, failed.cause) == ("transfer", "aborted")
        assert "unknown_job" in failed.detail


async def test_early_opens_are_bounded(tokenizer):
    async with pair(tokenizer, max_early_opens=1) as nodes:
        jobs = [nodes.job() for _ in range(2)]
        for job in jobs:
            nodes.decode.asking.accept(job.generate)
        failed = await nodes.decode.until(lambda: [m for m in nodes.decode.reports if isinstance(m, Failed)])
        assert "busy" in failed[0].detail
        for job in jobs:
            nodes.decode.asking.cancel(job.generation)


async def test_an_early_open_is_forgotten_with_its_abort_and_with_its_connection(tokenizer):
    async with pair(tokenizer) as nodes:
        first, second = nodes.job(), nodes.job()
        nodes.decode.asking.accept(first.generate)
        nodes.decode.asking.accept(second.generate)
        early = nodes.prefill.serving._early
        await nodes.prefill.until(lambda: len(early) == 2)
        nodes.decode.asking.cancel(first.generation)
        await nodes.prefill.until(lambda: set(early) == {second.ticket.transfer})
        early[second.ticket.transfer].peer.close("cut by the test")
        await nodes.prefill.until(lambda: not early)
        assert (await nodes.decode.ended(second.generation)).cause == "peer_lost"


async def test_a_grant_before_the_announce_ends_the_transfer(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        nodes.prefill.pages.allocate("blocker", 64)
        job = nodes.job()
        peer = await rogue.dial(nodes.prefill)
        nodes.prefill.serving.accept(job.prefill)
        peer.send(Open(job.prefill.ticket, ("raw",)))
        peer.send(Grant(job.ticket.transfer))
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("transfer", "violation")
        assert (await rogue.hears(Abort)).reason == "violation"
        nodes.prefill.room.release("blocker")


@pytest.mark.parametrize("ack", [(10**6, False), (0, True)])
async def test_an_ack_of_what_was_never_sent_ends_the_transfer(tokenizer, ack):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        job = nodes.job()
        peer = await rogue.dial(nodes.prefill)
        nodes.prefill.serving.accept(job.prefill)
        peer.send(Open(job.prefill.ticket, ("raw",)))
        await rogue.hears(Announce)
        peer.send(Ack(job.ticket.transfer, *ack))
        assert (await nodes.prefill.ended(job.transfer)).cause == "violation"


async def test_a_codec_that_the_decode_node_does_not_offer_is_not_used(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        job = nodes.job(codec="lossless")
        peer = await rogue.dial(nodes.prefill)
        nodes.prefill.serving.accept(job.prefill)
        peer.send(Open(job.prefill.ticket, ("raw",)))
        assert (await nodes.prefill.ended(job.transfer)).cause == "codec"
        assert (await rogue.hears(Abort)).reason == "codec"


async def test_an_unknown_codec_is_refused(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(codec="zip")
        nodes.prefill.serving.accept(job.prefill)
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("queue", "codec")


def test_used_ids_are_remembered_until_their_deadline_and_then_forgotten():
    used = UsedTransfers()
    used.add(b"a", until=10.0, now=0.0)
    used.add(b"b", until=20.0, now=5.0)
    assert b"a" in used
    used.add(b"c", until=30.0, now=10.5)
    assert b"a" not in used
    assert b"b" in used
    assert len(used) == 2
