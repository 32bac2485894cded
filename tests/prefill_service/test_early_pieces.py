"""The first pieces may leave before the Grant: bounded, never ahead of the Announce, and whatever becomes of them."""

import asyncio

import pytest

from kvcache.control import Finished, TransferDone
from kvcache.plan import plan_transfer
from kvcache.wire import Abort, Ack, Announce, Data, Grant, Manifest, Open
from tests.pair import CHUNK, LAYOUT, pair
from tests.prefill_service.test_resume import all_connected, finished_exactly, peer_of
from tests.rogue import Rogue
from tests.stages import release

PAGES = 256


async def asking(nodes, rogue, job, early_bytes):
    """The rogue opens the transfer; the decode node's name and key are its own."""
    peer = await rogue.dial(nodes.prefill)
    nodes.prefill.serving.accept(job.prefill)
    peer.send(Open(job.prefill.ticket, ("raw",), early_bytes=early_bytes))
    await rogue.hears(Announce)
    await nodes.prefill.until(lambda: nodes.prefill.engine.prefilled)
    await asyncio.sleep(0.05)
    return peer, [frame for frame in rogue.heard if isinstance(frame, Data)]


@pytest.mark.parametrize(("asked", "own", "allowed"), [(9000, 1 << 20, 9000), (1 << 20, 9000, 9000), (-1, 9000, 0)])
async def test_no_more_leaves_before_the_grant_than_both_sides_allow(tokenizer, asked, own, allowed):
    async with pair(tokenizer, early_bytes=own) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        job = nodes.job()
        peer, early = await asking(nodes, rogue, job, asked)
        assert sum(frame.raw_bytes for frame in early) <= allowed
        assert bool(early) == bool(allowed)
        assert not [frame for frame in rogue.heard if isinstance(frame, Manifest)]
        peer.send(Grant(job.ticket.transfer))
        await rogue.hears(Manifest)
        plan = plan_transfer(LAYOUT, 0, job.ticket.stop, CHUNK)
        peer.send(Ack(job.ticket.transfer, len(plan.pieces), committed=True))
        await nodes.prefill.serving.settled()
        sent = [frame.seq for frame in rogue.heard if isinstance(frame, Data)]
        assert sorted(sent) == list(range(len(plan.pieces)))


async def test_a_peer_that_does_not_speak_of_early_bytes_gets_none(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        job = nodes.job()
        peer, early = await asking(nodes, rogue, job, 0)
        assert early == []
        peer.send(Abort(job.ticket.transfer, "enough"))
        await nodes.prefill.ended(job.transfer)


async def test_a_whole_transfer_is_committed_before_its_grant_comes(tokenizer):
    async with pair(tokenizer) as nodes:
        first, job = nodes.job(200), nodes.job(300)
        nodes.start(first)
        await finished_exactly(nodes, first)
        peer, held = peer_of(nodes.decode), []
        send = peer.send
        peer.send = lambda frame: held.append(frame) if isinstance(frame, Grant) else send(frame)
        nodes.start(job)
        done = await finished_exactly(nodes, job)
        assert held == [Grant(job.ticket.transfer)]
        assert done.wire_bytes == done.raw_bytes
        send(held[0])


async def test_a_connection_that_the_announce_did_not_go_over_carries_nothing_before_the_grant(tokenizer):
    async with pair(tokenizer) as nodes:
        first, job = nodes.job(200), nodes.job(700)
        nodes.start(first)
        await finished_exactly(nodes, first)
        await all_connected(nodes)
        peer, held, used = peer_of(nodes.decode), [], []
        send, target = peer.send, peer.payload_target
        peer.send = lambda frame: held.append(frame) if isinstance(frame, Grant) else send(frame)
        peer.payload_target = lambda c, data: (used.append(c), target(c, data))[1]
        nodes.prefill.engine.hold_at = 1
        nodes.start(job)
        await nodes.decode.until(lambda: used)
        there = set(peer.connections)
        for connection in peer_of(nodes.prefill).connections[:3]:
            connection.end("cut by the test")
        await all_connected(nodes)
        await nodes.decode.until(lambda: len(set(peer.connections) - there) == 3)
        before = len(used)
        release(nodes)
        await nodes.decode.until(lambda: len(used) > before)
        await asyncio.sleep(0.1)
        assert set(used) <= there
        peer.send = send
        send(held[0])
        await finished_exactly(nodes, job)


async def test_what_was_lost_with_all_that_the_announce_went_over_waits_for_the_grant(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        job = nodes.job()
        peer, early = await asking(nodes, rogue, job, 1 << 20)
        plan = plan_transfer(LAYOUT, 0, job.ticket.stop, CHUNK)
        assert sorted(frame.seq for frame in early) == list(range(len(plan.pieces)))
        await rogue.hears(Manifest)
        rogue.heard.clear()
        serving, submitted = peer_of(nodes.prefill), []
        submit = serving.submit
        serving.submit = lambda data, *more: (submitted.append(data.seq), submit(data, *more))[1]
        for connection in serving.connections:
            connection.end("cut by the test")
        await rogue.hears(Announce)
        await asyncio.sleep(0.1)
        assert submitted == []
        assert {type(frame) for frame in rogue.heard} == {Announce}
        peer.send(Grant(job.ticket.transfer))
        await rogue.hears(Manifest)
        await nodes.prefill.until(lambda: len(submitted) == len(plan.pieces))
        assert sorted(submitted) == list(range(len(plan.pieces)))
        peer.send(Ack(job.ticket.transfer, len(plan.pieces), committed=True))
        await nodes.prefill.serving.settled()


async def test_what_is_missed_goes_again(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        job = nodes.job()
        peer, early = await asking(nodes, rogue, job, 1 << 20)
        assert len(early) > 3
        rogue.heard.clear()
        peer.send(Grant(job.ticket.transfer, (0, 2)))
        await asyncio.sleep(0.1)
        assert [frame.seq for frame in rogue.heard if isinstance(frame, Data)] == [0, 2]
        peer.send(Abort(job.ticket.transfer, "enough"))
        await nodes.prefill.ended(job.transfer)


async def test_a_grant_that_misses_what_was_never_sent_ends_the_transfer(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        job = nodes.job()
        peer, _ = await asking(nodes, rogue, job, 0)
        peer.send(Grant(job.ticket.transfer, (0,)))
        failed = await nodes.prefill.ended(job.transfer)
        assert (failed.cause, failed.detail.split(":")[0]) == ("violation", "missed")


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("cut", [0, 1, 4])
@pytest.mark.parametrize("room_after", [False, True])
async def test_early_pieces_survive_lost_connections_with_and_without_room(tokenizer, codec, cut, room_after):
    """They are lost on their way, or thrown away for want of room, or both: what is committed is what was exported."""
    async with pair(tokenizer, prefill_pages=PAGES, decode_pages=PAGES) as nodes:
        first = nodes.job(200)
        nodes.start(first)
        await finished_exactly(nodes, first)
        await all_connected(nodes)
        nodes.prefill.pages.allocate("blocker", nodes.prefill.pages.free_pages)
        job = nodes.job(700, codec=codec)
        nodes.start(job)
        exports = nodes.prefill.serving._exports
        await nodes.prefill.until(lambda: exports[job.ticket.transfer].peer)
        assert exports[job.ticket.transfer]._early_bytes > 0
        if room_after:
            nodes.decode.pages.allocate("blocker", nodes.decode.pages.free_pages)
        nodes.prefill.room.release("blocker")
        if room_after:
            await nodes.decode.until(lambda: nodes.decode.asking._by_transfer[job.ticket.transfer].fetch._missed)
        for connection in peer_of(nodes.prefill).connections[:cut]:
            connection.end("cut by the test")
        await asyncio.sleep(0.05)
        nodes.decode.room.release("blocker")
        done = await finished_exactly(nodes, job)
        assert done.raw_bytes <= done.wire_bytes < 1.01 * done.raw_bytes  # noise: nothing to compress


@pytest.mark.parametrize("prefill_pages", [40, 160])
async def test_twenty_transfers_that_miss_their_early_pieces_all_finish(tokenizer, prefill_pages):
    """All ask while there is room, and most find none: nobody waits for ever and nothing is counted twice."""
    async with pair(tokenizer, prefill_pages=prefill_pages, decode_pages=40) as nodes:
        nodes.prefill.pages.allocate("blocker", nodes.prefill.pages.free_pages)
        jobs = [nodes.job(400) for _ in range(20)]
        for job in jobs:
            nodes.start(job)
        await asyncio.sleep(0.1)
        nodes.prefill.room.release("blocker")
        for job in jobs:
            assert isinstance(await nodes.decode.ended(job.generation, 30.0), Finished)
            done = await nodes.decode.told(TransferDone, job.transfer)
            assert done.wire_bytes == done.raw_bytes
