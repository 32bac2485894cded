"""What carries a transfer: the first transport of its order that works, then the next, and never other bytes."""

import pytest

from kvcache.control import TransferDone
from tests.pair import pair
from tests.prefill_service.test_resume import finished_exactly, peer_of
from tests.stages import release

BOTH = ("shm", "tcp")


async def done_by(nodes, job) -> TransferDone:
    nodes.start(job)
    await finished_exactly(nodes, job)
    return await nodes.decode.told(TransferDone, job.transfer)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("tokens", [2, 64, 65, 300, 1000])
async def test_shared_memory_carries_what_was_exported_bit_for_bit(tokenizer, codec, tokens):
    async with pair(tokenizer, lanes=(True, True), prefill_pages=256, decode_pages=256) as nodes:
        done = await done_by(nodes, nodes.job(tokens, codec=codec, transports=BOTH))
        assert (done.transport, done.failed_transports) == ("shm", ())
        (lane,) = peer_of(nodes.prefill).lanes("shm")
        assert lane.figures.sent_bytes >= done.wire_bytes


async def test_an_order_without_transports_goes_by_tcp_though_a_lane_is_there(tokenizer):
    async with pair(tokenizer, lanes=(True, True)) as nodes:
        await done_by(nodes, nodes.job(transports=BOTH))
        (lane,) = peer_of(nodes.prefill).lanes("shm")
        before = lane.figures.sent_bytes
        done = await done_by(nodes, nodes.job())
        assert done.transport == "tcp"
        assert lane.figures.sent_bytes - before < 1000  # pings


@pytest.mark.parametrize("lanes", [(True, False), (False, True), (False, False)])
async def test_where_one_side_has_no_lanes_the_next_transport_carries_it_and_that_is_said(tokenizer, lanes):
    async with pair(tokenizer, lanes=lanes) as nodes:
        done = await done_by(nodes, nodes.job(transports=BOTH))
        assert (done.transport, done.failed_transports) == ("tcp", ("shm",))


async def test_a_lane_that_breaks_in_the_middle_loses_nothing_and_that_is_said(tokenizer):
    async with pair(tokenizer, lanes=(True, True), prefill_pages=256, decode_pages=256) as nodes:
        job = nodes.job(1000, transports=BOTH)
        nodes.prefill.engine.hold_at = 4
        nodes.start(job)
        await nodes.prefill.until(lambda: nodes.prefill.endpoint._peers and peer_of(nodes.prefill).lanes("shm"))
        (lane,) = peer_of(nodes.prefill).lanes("shm")
        await nodes.decode.until(lambda: lane.figures.sent_bytes > 10_000)
        lane.end("pulled")
        release(nodes)
        done = await finished_exactly(nodes, job)
        assert (done.transport, done.failed_transports) == ("tcp", ("shm",))
