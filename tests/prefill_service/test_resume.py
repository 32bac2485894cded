"""A transfer outlives the connections that carry it: whatever a lost one took along is said and sent again."""

import asyncio
import random
from dataclasses import replace

import msgspec
import pytest

from kvcache.control import Failed, Finished, TransferDone
from kvcache.digest import kv_digest, piece_digest
from kvcache.plan import plan_transfer
from kvcache.quality import Quality
from kvcache.transport import TransportLimits
from kvcache.wire import Ack, Announce, Data, Grant, Manifest, Open
from tests.fake_engine import piece_bytes
from tests.kvcache.kvnet import Proxy
from tests.pair import CHUNK, LAYOUT, Job, Pair, Side, pair
from tests.stages import BEFORE_COMMIT, reach, release

QUICK = TransportLimits(ping_every_s=0.1, lost_after_s=0.5, resume_s=0.8, backoff_most_s=0.1)


def peer_of(side: Side):
    """The side's one peer."""
    [peer] = side.endpoint._peers.values()
    return peer


async def all_connected(nodes: Pair) -> None:
    for side in (nodes.prefill, nodes.decode):
        await side.until(lambda side=side: len(peer_of(side).connections) == 4)


async def finished_exactly(nodes: Pair, job: Job) -> TransferDone:
    """The transfer was committed with the very bytes that were exported."""
    assert isinstance(await nodes.decode.ended(job.generation), Finished)
    done = await nodes.decode.told(TransferDone, job.transfer)
    plan = plan_transfer(LAYOUT, 0, job.ticket.stop, CHUNK)
    digests = b"".join(piece_digest([piece_bytes(job.generate.token_ids, piece)]) for piece in plan.pieces)
    assert done.kv_digest == kv_digest(digests)
    await nodes.idle()
    for side in (nodes.prefill, nodes.decode):
        assert not [m for m in side.reports if isinstance(m, Failed)]
    return done


@pytest.mark.parametrize("stage", BEFORE_COMMIT)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dial", ["in", "out"])
async def test_a_transfer_goes_on_over_what_is_left_or_comes_back(tokenizer, stage, count, dial):
    async with pair(tokenizer, dial=dial) as nodes:
        job = nodes.job(700)
        await reach(nodes, job, stage)
        await all_connected(nodes)
        for side in (nodes.prefill, nodes.decode):
            for connection in peer_of(side).connections[:count]:
                connection.end("cut by the test")
        await asyncio.sleep(0.02)
        release(nodes)
        done = await finished_exactly(nodes, job)
        assert done.wire_bytes == done.raw_bytes


@pytest.mark.parametrize(("codec", "quality"), [("raw", Quality.EXACT), ("lossless", Quality.EXACT)])
async def test_twenty_transfers_survive_connections_that_keep_breaking(tokenizer, codec, quality):
    async with pair(tokenizer, prefill_pages=256, decode_pages=256) as nodes:
        jobs = [nodes.job(600, codec=codec, quality=quality) for _ in range(20)]
        for job in jobs:
            nodes.start(job)
        dice = random.Random(3)

        async def cut() -> None:
            while True:
                await asyncio.sleep(0.01)
                for side in (nodes.prefill, nodes.decode):
                    for peer in side.endpoint._peers.values():
                        for connection in peer.connections:
                            if dice.random() < 0.2:
                                connection.end("cut by the test")

        cutting = asyncio.create_task(cut())
        try:
            for job in jobs:
                assert isinstance(await nodes.decode.ended(job.generation), Finished)
        finally:
            cutting.cancel()
            await asyncio.gather(cutting, return_exceptions=True)
        for job in jobs:
            await finished_exactly(nodes, job)
        await all_connected(nodes)


@pytest.mark.parametrize("lost", [Open, Announce, Grant, Manifest, Ack, Data], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("all_of_them", [False, True], ids=["one", "all"])
async def test_a_frame_that_was_lost_with_its_connection_is_sent_again(tokenizer, lost, all_of_them):
    async with pair(tokenizer) as nodes:
        first = nodes.job(200)
        nodes.start(first)
        await finished_exactly(nodes, first)
        await all_connected(nodes)
        sender = nodes.decode if lost in (Open, Grant, Ack) else nodes.prefill
        peer, hit = peer_of(sender), []

        def swallow(frame, over) -> bool:
            """Lose the first frame of the kind as if it lay in the buffer of a connection that breaks."""
            if hit or not isinstance(frame, lost) or (lost is Ack and not frame.committed):
                return False
            hit.append(frame)
            for connection in over[:losses]:
                asyncio.get_running_loop().call_soon(connection.end, "cut by the test")
            return True

        send, send_over, submit = peer.send, peer.send_over, peer.submit
        losses = 4 if all_of_them else 1

        def submit_or_swallow(data, payload, left=0, only=None):
            over = only or peer.connections
            if not swallow(data, over):
                return submit(data, payload, left, only)
            item = submit(msgspec.structs.replace(data, transfer=bytes(16)), payload, left, only)
            item.finish(over[0])
            return item

        peer.send = lambda frame: None if swallow(frame, peer.connections) else send(frame)
        peer.send_over = lambda frame, over: send_over(frame, over[losses:] if swallow(frame, over) else over)
        peer.submit = submit_or_swallow
        job = nodes.job(700)
        nodes.start(job)
        await finished_exactly(nodes, job)
        assert hit


@pytest.mark.parametrize("how", ["closed", "silent"])
async def test_a_way_that_does_not_come_back_fails_both_legs_in_time(tokenizer, how):
    async with pair(tokenizer, transport=QUICK) as nodes:
        proxy = Proxy(nodes.prefill.port)
        address = await proxy.start()
        job = nodes.job(700)
        source = msgspec.structs.replace(job.generate.source, dial=address)
        await reach(nodes, replace(job, generate=msgspec.structs.replace(job.generate, source=source)), "streaming")
        await all_connected(nodes)
        began = asyncio.get_running_loop().time()
        if how == "closed":
            await proxy.stop()
        else:
            proxy.silent = True
        for side, name in ((nodes.prefill, job.transfer), (nodes.decode, job.generation)):
            failed = await side.ended(name)
            assert (failed.stage, failed.cause) == ("transfer", "peer_lost")
        assert asyncio.get_running_loop().time() - began < 2.5
        release(nodes)
        await proxy.stop()


async def test_a_transfer_that_is_cancelled_while_nobody_is_connected_is_over_on_both_sides(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(700)
        await reach(nodes, job, "streaming")
        await all_connected(nodes)
        for connection in peer_of(nodes.decode).connections:
            connection.end("cut by the test")
        nodes.decode.asking.cancel(job.generation)
        await nodes.decode.ended(job.generation)
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.stage, failed.cause) == ("transfer", "aborted")
        release(nodes)
