"""However a transfer ends, and wherever it was: both sides say so, and neither holds anything afterwards."""

import asyncio
import threading

import pytest

from kvcache.control import Cancelled, Failed, Finished
from kvcache.transport import TransportLimits
from kvcache.wire import Abort, Open
from prefill_service.sender import encode_batch
from tests.pair import pair
from tests.rogue import Rogue
from tests.stages import AFTER_COMMIT, BEFORE_COMMIT, STAGES, reach, release


@pytest.mark.parametrize("stage", BEFORE_COMMIT)
async def test_a_cancelled_prefill_ends_both_legs(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        assert nodes.prefill.serving.cancel(job.transfer)
        assert isinstance(await nodes.prefill.ended(job.transfer), Cancelled)
        failed = await nodes.decode.ended(job.generation)
        assert isinstance(failed, Failed)
        assert (failed.stage, failed.cause) == ("transfer", "aborted")
        assert "cancelled" in failed.detail
        release(nodes)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_generation_ends_both_legs(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        assert nodes.decode.asking.cancel(job.generation)
        assert isinstance(await nodes.decode.ended(job.generation), Cancelled)
        if stage in BEFORE_COMMIT:
            failed = await nodes.prefill.ended(job.transfer)
            assert isinstance(failed, Failed)
            assert (failed.stage, failed.cause) == ("transfer", "aborted")
        release(nodes)
        await nodes.idle()
        assert nodes.decode.engine.generated == []


@pytest.mark.parametrize("stage", BEFORE_COMMIT)
async def test_a_lost_connection_fails_both_legs(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        nodes.prefill.serving._exports[job.ticket.transfer].peer.close("cut by the test")
        for side, name in ((nodes.prefill, job.transfer), (nodes.decode, job.generation)):
            failed = await side.ended(name)
            assert isinstance(failed, Failed)
            assert (failed.stage, failed.cause) == ("transfer", "peer_lost")
        release(nodes)


@pytest.mark.parametrize("stage", AFTER_COMMIT)
async def test_a_connection_lost_after_the_commit_harms_nothing(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        await nodes.prefill.endpoint.close()
        release(nodes)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


@pytest.mark.parametrize("stage", STAGES)
async def test_at_the_deadline_both_sides_free_everything_and_say_so(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job(seconds=0.7)
        await reach(nodes, job, stage)
        failed = await nodes.decode.ended(job.generation)
        assert isinstance(failed, Failed)
        assert failed.cause == "deadline" or (failed.cause == "aborted" and "deadline" in failed.detail)
        if stage in BEFORE_COMMIT:
            failed = await nodes.prefill.ended(job.transfer)
            assert failed.cause == "deadline" or (failed.cause == "aborted" and "deadline" in failed.detail)
        await nodes.idle_but("blocker")
        release(nodes)


async def test_a_prefill_that_nobody_asks_for_is_freed_at_its_deadline(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(seconds=0.4)
        nodes.prefill.serving.accept(job.prefill)
        await nodes.prefill.until(lambda: nodes.prefill.engine.prefilled)
        assert nodes.prefill.pages.owners
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("transfer", "deadline")


@pytest.mark.parametrize("stage", ["computing", "streaming"])
async def test_an_engine_lost_during_prefill_fails_both_legs(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        nodes.prefill.engine.lose("killed by the test")
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("prefill", "engine_lost")
        assert "killed by the test" in failed.detail
        failed = await nodes.decode.ended(job.generation)
        assert (failed.stage, failed.cause) == ("transfer", "aborted")
        assert "engine_lost" in failed.detail


@pytest.mark.parametrize("stage", AFTER_COMMIT)
async def test_an_engine_lost_while_it_answers_fails_the_generation(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        nodes.decode.engine.lose("killed by the test")
        failed = await nodes.decode.ended(job.generation)
        assert failed.cause == "engine_lost"
        assert failed.stage == ("load" if stage == "loading" else "decode")


async def test_a_prefill_that_the_engine_fails_is_reported_with_the_engines_cause(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine.fail_prefill_after = 1
        job = nodes.job()
        nodes.start(job)
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause, failed.detail) == ("prefill", "boom", "as the test wanted")
        assert (await nodes.decode.ended(job.generation)).cause == "aborted"


async def test_a_job_without_an_engine_is_refused_at_once(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine_present = False
        job = nodes.job()
        nodes.prefill.serving.accept(job.prefill)
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("queue", "engine_lost")


@pytest.mark.parametrize("stage", STAGES)
async def test_a_job_that_is_cancelled_while_it_fails_still_ends_in_cancelled(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        generation = nodes.decode.asking._generations[job.generation]
        generation.fate.end("something", "went wrong first")
        nodes.decode.asking.cancel(job.generation)
        assert isinstance(await nodes.decode.ended(job.generation), Cancelled)
        release(nodes)
        await nodes.idle()
        assert not [m for m in nodes.decode.reports if isinstance(m, Failed)]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_lost_gateway_ends_every_job(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        nodes.prefill.serving.end_all("gateway_lost", "by the test")
        nodes.decode.asking.end_all("gateway_lost", "by the test")
        release(nodes)
        await nodes.idle()


@pytest.mark.parametrize("stage", STAGES)
async def test_closing_a_node_ends_its_jobs_and_frees_everything(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        await nodes.prefill.serving.close()
        await nodes.decode.asking.close()
        await nodes.idle_but("blocker")
        release(nodes)


async def test_one_transfers_end_leaves_the_others_on_the_same_connection_alone(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine.hold_at = 1
        jobs = [nodes.job() for _ in range(3)]
        for job in jobs:
            nodes.start(job)
        exports = nodes.prefill.serving._exports
        await nodes.prefill.until(lambda: len(exports) == 3 and all(e.peer is not None for e in exports.values()))
        nodes.decode.asking.cancel(jobs[1].generation)
        assert isinstance(await nodes.decode.ended(jobs[1].generation), Cancelled)
        release(nodes)
        for job in (jobs[0], jobs[2]):
            assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_an_open_that_comes_while_its_job_ends_is_told_so(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        nodes.prefill.engine.gate.clear()
        nodes.prefill.engine.chunk_s = 0.3
        job = nodes.job()
        peer = await rogue.dial(nodes.prefill)
        nodes.prefill.serving.accept(job.prefill)
        await nodes.prefill.until(lambda: nodes.prefill.engine.jobs)
        nodes.prefill.serving.cancel(job.transfer)
        peer.send(Open(job.prefill.ticket, ("raw",)))
        assert (await rogue.hears(Abort)).reason == "cancelled"
        assert nodes.prefill.engine.jobs
        release(nodes)


@pytest.mark.parametrize("stage", ["computing", "streaming"])
async def test_pages_stay_with_their_job_until_the_engine_has_let_go(tokenizer, stage):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, stage)
        nodes.prefill.engine.chunk_s = 0.2
        nodes.prefill.serving.cancel(job.transfer)
        await asyncio.sleep(0.05)
        assert nodes.prefill.pages.owners
        assert not [m for m in nodes.prefill.reports if isinstance(m, Cancelled)]
        cancelled = await nodes.prefill.ended(job.transfer)
        assert cancelled.prefilled_tokens == (0 if stage == "computing" else 128)
        assert nodes.prefill.pages.owners == {}
        release(nodes)


async def test_pages_stay_with_their_job_until_no_thread_reads_them(tokenizer, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def held(*call):
        begun.set()
        assert go_on.wait(10)
        return encode_batch(*call)

    monkeypatch.setattr("prefill_service.sender.encode_batch", held)
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        nodes.start(job)
        await nodes.prefill.until(begun.is_set)
        await nodes.prefill.until(lambda: nodes.prefill.engine.prefilled)
        nodes.prefill.serving.cancel(job.transfer)
        await asyncio.sleep(0.05)
        assert nodes.prefill.pages.owners
        go_on.set()
        assert isinstance(await nodes.prefill.ended(job.transfer), Cancelled)
        assert nodes.prefill.pages.owners == {}


@pytest.mark.parametrize(
    ("broken", "failing", "other"),
    [
        ("prefill_service.sender.encode_batch", "prefill", "decode"),
        ("decode_client.fetch.check_batch", "decode", "prefill"),
    ],
)
async def test_an_exception_in_a_thread_ends_both_legs_and_its_cause_is_told(
    tokenizer, monkeypatch, broken, failing, other
):
    def fail(*call):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(broken, fail)
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        nodes.start(job)
        names = {"prefill": job.transfer, "decode": job.generation}
        failed = await getattr(nodes, failing).ended(names[failing])
        assert (failed.cause, failed.detail) == ("internal", "RuntimeError: out of luck")
        failed = await getattr(nodes, other).ended(names[other])
        assert failed.cause == "aborted"
        assert "out of luck" in failed.detail


async def test_a_connection_in_use_is_kept_however_long_it_has_nothing_to_carry(tokenizer):
    quick = TransportLimits(ping_every_s=0.1, lost_after_s=0.3, resume_s=0.3)
    async with pair(tokenizer, transport=quick) as nodes:
        job = nodes.job()
        await reach(nodes, job, "computing")
        [peer] = nodes.decode.endpoint._peers.values()
        await nodes.decode.until(lambda: len(peer.connections) == quick.connections)
        before = peer.connections
        await asyncio.sleep(1.2)
        assert peer.connections == before
        release(nodes)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
