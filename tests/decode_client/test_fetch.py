"""What a prefill node may do to a decode node: fill the pages of the transfer it was asked for with the right bytes."""

import asyncio
import threading
from contextlib import asynccontextmanager

import msgspec
import pytest

from decode_client.landing import check_batch
from kvcache import codecs
from kvcache.control import Failed, Finished, KvAddress, TransferDone
from kvcache.digest import piece_digest
from kvcache.plan import plan_transfer
from kvcache.transfer import OutgoingTransfer
from kvcache.wire import Abort, Ack, Announce, Grant, Manifest, Open
from tests.fake_engine import piece_bytes
from tests.kvcache.kvnet import send_data
from tests.pair import CHUNK, LAYOUT, Job, Pair, pair
from tests.rogue import Rogue


class Sender(Rogue):
    """Poses as the prefill node of a pair and sends a transfer piece by piece, right or wrong."""

    def __init__(self, nodes: Pair, job: Job, codec: str = "raw") -> None:
        super().__init__(nodes.prefill.name, nodes.prefill.incarnation, nodes.prefill.key)
        self.plan = plan_transfer(LAYOUT, 0, job.ticket.stop, CHUNK)
        self.outgoing = OutgoingTransfer(self.plan, job.ticket)
        self.codec = codecs.by_name(codec)
        self.job = job

    async def opened(self) -> None:
        await self.hears(Open)
        self.peer.send(self.outgoing.announce(self.codec.name))
        await self.hears(Grant)

    def encoded(self, piece):
        raw = piece_bytes(self.job.generate.token_ids, piece)
        payload = b"".join(self.codec.encode([memoryview(raw)], self.plan.tensor(piece).dtype, self.plan.shape(piece)))
        return payload, piece_digest([raw])

    async def send(self, piece, *, damage=lambda payload: payload, **changes):
        payload, digest = self.encoded(piece)
        payload = damage(payload)
        data = self.outgoing.header(piece, self.codec.name, len(payload), digest)
        data = msgspec.structs.replace(data, **changes)
        await send_data(self.peer, data, [payload])

    async def send_all(self):
        for piece in self.plan.pieces:
            await self.send(piece)


@asynccontextmanager
async def posing(tokenizer, codec="raw", tokens=300, **options):
    """A pair whose decode node asks a ``Sender`` that the test plays."""
    async with pair(tokenizer, **options) as nodes:
        job = nodes.job(tokens)
        async with Sender(nodes, job, codec) as sender:
            port = await sender.endpoint.listen("127.0.0.1", 0)
            source = msgspec.structs.replace(job.generate.source, dial=KvAddress("127.0.0.1", port))
            nodes.decode.asking.accept(msgspec.structs.replace(job.generate, source=source))
            yield nodes, job, sender


async def failure(nodes: Pair, job: Job) -> Failed:
    failed = await nodes.decode.ended(job.generation)
    assert isinstance(failed, Failed)
    assert failed.stage == "transfer"
    assert nodes.decode.engine.generated == []
    assert not [m for m in nodes.decode.reports if isinstance(m, TransferDone)]
    return failed


@pytest.mark.parametrize("codec", ["raw", "lossless"])
async def test_the_right_pieces_are_acknowledged_and_committed(tokenizer, codec):
    async with posing(tokenizer, codec, tokens=1200) as (nodes, job, sender):
        await sender.opened()
        await sender.send_all()
        assert not (await sender.hears(Ack)).committed
        sender.peer.send(sender.outgoing.manifest(-0.25))
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        acks = [f for f in sender.heard if isinstance(f, Ack)]
        assert [a.next_seq for a in acks] == sorted(a.next_seq for a in acks)
        assert acks[-1] == Ack(job.ticket.transfer, len(sender.plan.pieces), committed=True)
        done = await nodes.decode.told(TransferDone, job.transfer)
        assert 0.25 <= done.exposed_s < 1.0


@pytest.mark.parametrize(("computed_after_s", "least_s"), [(0.0, 0.4), (0.3, 0.1)])
async def test_time_that_the_manifest_spends_on_its_way_is_exposed(tokenizer, computed_after_s, least_s):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send_all()
        manifest = sender.outgoing.manifest(computed_after_s)
        await asyncio.sleep(0.4)
        sender.peer.send(manifest)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        done = await nodes.decode.told(TransferDone, job.transfer)
        assert least_s - 0.05 <= done.exposed_s <= done.transfer_s - computed_after_s


async def test_a_prefill_that_ends_after_the_commit_exposes_nothing(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send_all()
        sender.peer.send(sender.outgoing.manifest(1000.0))
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        assert (await nodes.decode.told(TransferDone, job.transfer)).exposed_s == 0.0


def flipped(payload: bytes) -> bytes:
    return payload[:-1] + bytes([payload[-1] ^ 1])


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("at", [0, 7, -1])
async def test_a_damaged_payload_is_detected_and_never_decoded(tokenizer, codec, at):
    async with posing(tokenizer, codec) as (nodes, job, sender):
        await sender.opened()
        for piece in sender.plan.pieces:
            bad = piece is sender.plan.pieces[at]
            await sender.send(piece, damage=flipped if bad else lambda payload: payload)
        sender.peer.send(sender.outgoing.manifest(0.0))
        failed = await failure(nodes, job)
        assert failed.cause == "corrupt"
        assert f"piece {range(len(sender.plan.pieces))[at]}" in failed.detail
        assert (await sender.hears(Abort)).reason == "corrupt"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seq": 10_000}, "seq"),
        ({"seq": -1}, "seq"),
        ({"seq": 1}, "tensor"),
        ({"start": 1}, "start"),
        ({"stop": 1}, "stop"),
        ({"layer": 1}, "layer"),
        ({"group": 2}, "group"),
        ({"tensor": 1}, "tensor"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"codec": "lossless"}, "codec"),
        ({"raw_bytes": 1}, "raw_bytes"),
        ({"digest": b""}, "digest"),
    ],
)
async def test_a_header_that_differs_from_the_plan_ends_the_transfer(tokenizer, changes, field):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send(sender.plan.pieces[0], **changes)
        failed = await failure(nodes, job)
        assert (failed.cause, failed.detail.split(":")[0]) == ("violation", field)
        assert (await sender.hears(Abort)).reason == "violation"


async def test_a_payload_larger_than_its_piece_ends_the_transfer(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send(sender.plan.pieces[0], damage=lambda payload: payload + b"more")
        assert "wire_bytes" in (await failure(nodes, job)).detail


@pytest.mark.parametrize("skipped", [0, -1])
async def test_a_missing_piece_is_named_however_the_manifest_looks(tokenizer, skipped):
    async with posing(tokenizer, straggler_s=0.2) as (nodes, job, sender):
        await sender.opened()
        pieces = list(sender.plan.pieces)
        missing = pieces.pop(skipped)
        for piece in pieces:
            if missing.seq == 0:
                break
            await sender.send(piece)
        digests = b"".join(sender.encoded(piece)[1] for piece in sender.plan.pieces)
        sender.peer.send(Manifest(job.ticket.transfer, digests, 0.0))
        failed = await failure(nodes, job)
        assert failed.cause == "violation"
        assert f"piece {missing.seq} of {len(sender.plan.pieces)}" in failed.detail


async def test_a_manifest_with_other_digests_is_refused(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send_all()
        manifest = sender.outgoing.manifest(0.0)
        sender.peer.send(msgspec.structs.replace(manifest, digests=flipped(manifest.digests)))
        assert "digests" in (await failure(nodes, job)).detail


@pytest.mark.parametrize("field", ["pieces", "raw_bytes", "codec"])
async def test_an_announce_that_differs_from_the_plan_is_refused_before_memory_is_taken(tokenizer, field):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.hears(Open)
        wrong = {"pieces": 1, "raw_bytes": 1, "codec": "zip"}
        sender.peer.send(msgspec.structs.replace(sender.outgoing.announce("raw"), **{field: wrong[field]}))
        assert field in (await failure(nodes, job)).detail
        assert not [f for f in sender.heard if isinstance(f, Grant)]


async def test_an_announce_may_be_repeated_but_not_changed(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send(sender.plan.pieces[0])
        sender.peer.send(sender.outgoing.announce("raw"))
        for piece in sender.plan.pieces[1:]:
            await sender.send(piece)
        await nodes.decode.until(lambda: len([f for f in sender.heard if isinstance(f, Ack)]))
        sender.peer.send(sender.outgoing.announce("lossless"))
        assert (await failure(nodes, job)).cause == "violation"


async def test_pieces_may_come_in_any_order_twice_and_after_the_manifest(tokenizer):
    async with posing(tokenizer, tokens=1200) as (nodes, job, sender):
        await sender.opened()
        frames = []
        for piece in sender.plan.pieces:
            payload, digest = sender.encoded(piece)
            frames.append((sender.outgoing.header(piece, "raw", len(payload), digest), payload))
        sender.peer.send(sender.outgoing.manifest(0.0))
        for header, payload in [*frames[:0:-1], *frames[5:9]]:
            await send_data(sender.peer, header, [payload])
        await asyncio.sleep(0.05)
        assert not [f for f in sender.heard if isinstance(f, Ack)]
        await send_data(sender.peer, frames[0][0], [frames[0][1]])
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        done = await nodes.decode.told(TransferDone, job.transfer)
        assert done.wire_bytes == done.raw_bytes == sender.plan.nbytes


async def test_a_repeat_with_another_digest_ends_the_transfer(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        piece = sender.plan.pieces[0]
        await sender.send(piece)
        payload, digest = sender.encoded(piece)
        header = sender.outgoing.header(piece, "raw", len(payload), digest)
        await send_data(sender.peer, msgspec.structs.replace(header, digest=flipped(digest)), [payload])
        failed = await failure(nodes, job)
        assert (failed.cause, failed.detail.split(":")[0]) == ("violation", "digest")


async def test_whoever_asks_after_a_transfer_that_is_over_is_answered(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send_all()
        sender.peer.send(sender.outgoing.manifest(0.0))
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        sender.heard.clear()
        sender.peer.send(sender.outgoing.manifest(0.0))
        assert (await sender.hears(Ack)).committed
        sender.peer.send(Announce(b"never asked for ", 1, 1, "raw"))
        assert (await sender.hears(Abort)).reason == "unknown_transfer"


async def test_data_before_the_announce_ends_the_transfer(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        assert (await sender.hears(Open)).early_bytes > 0
        await sender.send(sender.plan.pieces[0])
        failed = await failure(nodes, job)
        assert (failed.cause, failed.detail) == ("violation", "data: came before the Announce")


async def test_a_manifest_before_the_announce_ends_the_transfer(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.hears(Open)
        sender.peer.send(Manifest(job.ticket.transfer, b"", 0.0))
        assert "came before the Announce" in (await failure(nodes, job)).detail


async def in_a_row(sender: Sender, pieces, *, manifest: bool = False) -> None:
    """Announce over each connection and send pieces behind it, as a sender does that has not been granted room."""
    await sender.hears(Open)
    over = sender.peer.connections
    sender.peer.send_over(sender.outgoing.announce(sender.codec.name), over)
    for piece in pieces:
        payload, digest = sender.encoded(piece)
        header = sender.outgoing.header(piece, sender.codec.name, len(payload), digest)
        await sender.peer.carried(sender.peer.submit(header, [payload], 0, over))
    if manifest:
        sender.peer.send_over(sender.outgoing.manifest(0.0, granted=False), over)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
async def test_pieces_and_a_manifest_that_do_not_wait_for_the_grant_land_like_all_others(tokenizer, codec):
    async with posing(tokenizer, codec) as (nodes, job, sender):
        await in_a_row(sender, sender.plan.pieces, manifest=True)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        assert await sender.hears(Grant) == Grant(job.ticket.transfer)
        done = await nodes.decode.told(TransferDone, job.transfer)
        assert done.wire_bytes == sender.outgoing.wire_bytes
        assert 0 <= done.exposed_s <= done.transfer_s + 0.05 < 1.0


@pytest.mark.parametrize("codec", ["raw", "lossless"])
async def test_pieces_that_came_before_there_was_room_are_named_in_the_grant_and_count_once(tokenizer, codec):
    async with posing(tokenizer, codec) as (nodes, job, sender):
        await sender.hears(Open)
        nodes.decode.pages.allocate("blocker", 64)
        early = sender.plan.pieces[:5]
        await in_a_row(sender, early)
        await sender.send(early[2])
        await nodes.decode.until(lambda: nodes.decode.room.waiting)
        await asyncio.sleep(0.05)
        assert nodes.decode.pages.owners.keys() == {"blocker"}
        assert not [f for f in sender.heard if isinstance(f, Grant)]
        nodes.decode.room.release("blocker")
        assert await sender.hears(Grant) == Grant(job.ticket.transfer, (0, 1, 2, 3, 4))
        await sender.send_all()
        sender.peer.send(sender.outgoing.manifest(0.0))
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        done = await nodes.decode.told(TransferDone, job.transfer)
        assert done.wire_bytes == sender.outgoing.wire_bytes


async def test_a_missed_piece_that_does_not_come_again_is_never_committed(tokenizer):
    async with posing(tokenizer, straggler_s=0.2) as (nodes, job, sender):
        await sender.hears(Open)
        nodes.decode.pages.allocate("blocker", 64)
        await in_a_row(sender, sender.plan.pieces, manifest=True)
        await nodes.decode.until(lambda: nodes.decode.room.waiting)
        await asyncio.sleep(0.05)
        nodes.decode.room.release("blocker")
        for piece in sender.plan.pieces[1:]:
            await sender.send(piece)
        failed = await failure(nodes, job)
        assert f"piece 0 of {len(sender.plan.pieces)}" in failed.detail


async def test_the_grant_said_again_names_what_was_missed_again(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.hears(Open)
        nodes.decode.pages.allocate("blocker", 64)
        await in_a_row(sender, sender.plan.pieces[:2])
        await nodes.decode.until(lambda: nodes.decode.room.waiting)
        await asyncio.sleep(0.05)
        nodes.decode.room.release("blocker")
        await sender.hears(Grant)
        sender.heard.clear()
        sender.peer.connections[0].end("cut by the test")
        assert await sender.hears(Grant) == Grant(job.ticket.transfer, (0, 1))
        await sender.send_all()
        sender.peer.send(sender.outgoing.manifest(0.0))
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


@pytest.mark.parametrize("allowed", [0, 10_000])
async def test_more_than_was_allowed_before_the_grant_ends_the_transfer(tokenizer, allowed):
    async with posing(tokenizer, early_bytes=allowed) as (nodes, job, sender):
        assert (await sender.hears(Open)).early_bytes == allowed
        nodes.decode.pages.allocate("blocker", 64)
        await in_a_row(sender, sender.plan.pieces)
        failed = await failure(nodes, job)
        assert (failed.cause, failed.detail) == ("violation", "data: came before the Grant")
        nodes.decode.room.release("blocker")


async def test_nothing_early_is_asked_for_where_there_is_no_room(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.pages.allocate("blocker", 64)
        job = nodes.job()
        nodes.prefill.engine.gate.clear()
        nodes.start(job)
        exports = nodes.prefill.serving._exports
        await nodes.prefill.until(lambda: exports[job.ticket.transfer].peer)
        assert exports[job.ticket.transfer]._early_bytes == 0
        nodes.prefill.engine.gate.set()
        nodes.decode.room.release("blocker")
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_another_peer_cannot_touch_the_transfer(tokenizer):
    async with posing(tokenizer, dial="out") as (nodes, job, sender), Rogue("stranger", "1") as stranger:
        await sender.opened()
        peer = await stranger.dial(nodes.decode)
        peer.send(Abort(job.ticket.transfer, "mine"))
        peer.send(sender.outgoing.announce("raw"))
        peer.send(Manifest(job.ticket.transfer, b"", 0.0))
        piece = sender.plan.pieces[0]
        payload, digest = sender.encoded(piece)
        forged = OutgoingTransfer(sender.plan, job.ticket).header(piece, "raw", len(payload), digest)
        await send_data(peer, forged, [bytes(len(payload))])
        await asyncio.sleep(0.05)
        await sender.send_all()
        sender.peer.send(sender.outgoing.manifest(0.0))
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_memory_is_taken_back_from_a_payload_under_way_before_its_pages_are_freed(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        piece = sender.plan.pieces[0]
        payload, digest = sender.encoded(piece)
        fetch = nodes.decode.asking._by_transfer[job.ticket.transfer].fetch
        taken_back = []
        drop, pages = fetch.peer.drop_payload, nodes.decode.pages
        fetch.peer.drop_payload = lambda transfer: (taken_back.append((transfer, dict(pages.owners))), drop(transfer))
        data = sender.outgoing.header(piece, "raw", len(payload), digest)
        assert nodes.decode.handler.payload_target(fetch.peer, data)
        nodes.decode.asking.cancel(job.generation)
        await nodes.decode.ended(job.generation)
        ((transfer, owners),) = taken_back
        assert transfer == job.ticket.transfer
        assert owners
        assert pages.owners == {}


async def test_pieces_that_come_after_a_cancel_go_nowhere(tokenizer):
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send(sender.plan.pieces[0])
        nodes.decode.asking.cancel(job.generation)
        await nodes.decode.ended(job.generation)
        nodes.decode.pages.allocate("next owner", 64)
        before = bytes(nodes.decode.pool.buffer)
        for late in sender.plan.pieces[1:4]:
            await sender.send(late)
        await asyncio.sleep(0.05)
        assert bytes(nodes.decode.pool.buffer) == before
        nodes.decode.room.release("next owner")


async def test_a_cancelled_transfer_keeps_its_pages_while_a_thread_uses_them_and_takes_nothing_more(
    tokenizer, monkeypatch
):
    begun, go_on = threading.Event(), threading.Event()

    def held(*call):
        begun.set()
        assert go_on.wait(10)
        return check_batch(*call)

    monkeypatch.setattr("decode_client.fetch.check_batch", held)
    async with posing(tokenizer) as (nodes, job, sender):
        await sender.opened()
        await sender.send(sender.plan.pieces[0])
        await nodes.decode.until(begun.is_set)
        nodes.decode.asking.cancel(job.generation)
        await asyncio.sleep(0.05)
        before = bytes(nodes.decode.pool.buffer)
        await sender.send(sender.plan.pieces[1])
        await asyncio.sleep(0.05)
        assert bytes(nodes.decode.pool.buffer) == before
        assert nodes.decode.pages.owners
        go_on.set()
        await nodes.decode.ended(job.generation)
        assert nodes.decode.pages.owners == {}


async def test_a_prefill_node_that_falls_silent_costs_no_memory_beyond_the_deadline(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(seconds=0.5)
        async with Sender(nodes, job) as sender:
            port = await sender.endpoint.listen("127.0.0.1", 0)
            source = msgspec.structs.replace(job.generate.source, dial=KvAddress("127.0.0.1", port))
            nodes.decode.asking.accept(msgspec.structs.replace(job.generate, source=source))
            await sender.opened()
            await sender.send(sender.plan.pieces[0])
            assert nodes.decode.pages.owners
            failed = await nodes.decode.ended(job.generation)
            assert failed.cause == "deadline"
            assert (await sender.hears(Abort)).reason == "deadline"
            await nodes.idle()


async def test_encoded_bytes_that_wait_for_a_decoder_are_bounded_by_not_reading(tokenizer):
    async with posing(tokenizer, "lossless", tokens=1500, scratch_bytes=4000) as (nodes, job, sender):
        await sender.opened()
        threads = asyncio.Event()
        fetch = nodes.decode.asking._by_transfer[job.ticket.transfer].fetch
        start = fetch._threads.start

        async def held(*call):
            await threads.wait()
            return await start(*call)

        fetch._threads.start = held
        sending = asyncio.create_task(sender.send_all())
        scratch = nodes.decode.asking._scratch
        await nodes.decode.until(lambda: scratch._paused)
        await asyncio.sleep(0.1)
        assert 4000 < scratch.held_bytes < 4000 + 3 * 2048
        threads.set()
        await sending
        sender.peer.send(sender.outgoing.manifest(0.0))
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_a_node_with_another_incarnation_is_not_asked(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(seconds=2.0)
        async with Rogue(nodes.prefill.name, "restarted", nodes.prefill.key) as other:
            port = await other.endpoint.listen("127.0.0.1", 0)
            source = msgspec.structs.replace(job.generate.source, dial=KvAddress("127.0.0.1", port))
            nodes.decode.asking.accept(msgspec.structs.replace(job.generate, source=source))
            failed = await failure(nodes, job)
            assert failed.cause == "peer_refused"
            assert "incarnation" in failed.detail


async def test_a_node_that_cannot_be_reached_is_reported_at_the_deadline(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(seconds=0.5)
        source = msgspec.structs.replace(job.generate.source, dial=KvAddress("127.0.0.1", 1))
        nodes.decode.asking.accept(msgspec.structs.replace(job.generate, source=source))
        assert (await failure(nodes, job)).cause in ("peer_unreachable", "deadline")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"start": 65}, "start"),
        ({"stop": 200}, "stop"),
        ({"decode_key": bytes(32)}, "decode_key"),
        ({"prefill_node": "north"}, "prefill_node"),
        ({"prefill_incarnation": "old"}, "prefill_incarnation"),
        ({"fingerprint": "0" * 32}, "fingerprint"),
        ({"chunk_tokens": 64}, "chunk_tokens"),
    ],
)
async def test_a_ticket_that_does_not_fit_the_job_is_refused_naming_the_field(tokenizer, changes, field):
    async with pair(tokenizer) as nodes:
        job = nodes.job(**changes)
        nodes.decode.asking.accept(job.generate)
        failed = await nodes.decode.ended(job.generation)
        assert (failed.stage, failed.cause) == ("queue", "bad_ticket")
        assert f"ticket {field}" in failed.detail


async def test_the_announce_comes_only_when_the_open_came_and_room_is_there(tokenizer):
    async with pair(tokenizer) as nodes, Rogue("west-2", "1", nodes.decode.key) as rogue:
        nodes.prefill.pages.allocate("blocker", 64)
        job = nodes.job()
        peer = await rogue.dial(nodes.prefill)
        nodes.prefill.serving.accept(job.prefill)
        peer.send(Open(job.prefill.ticket, ("raw",)))
        await asyncio.sleep(0.1)
        assert not [f for f in rogue.heard if isinstance(f, Announce)]
        nodes.prefill.room.release("blocker")
        await rogue.hears(Announce)
        nodes.prefill.serving.cancel(job.transfer)


@pytest.mark.parametrize("codec", ["int8", "int4"])
async def test_a_sender_that_announces_an_inexact_codec_for_an_exact_request_gets_no_room(tokenizer, codec):
    async with posing(tokenizer, codec) as (nodes, job, sender):
        await sender.hears(Open)
        sender.peer.send(sender.outgoing.announce(codec))
        failed = await failure(nodes, job)
        assert (failed.cause, f"'{codec}' was not offered" in failed.detail) == ("violation", True)
        await sender.hears(Abort)
        assert not [frame for frame in sender.heard if isinstance(frame, Grant)]
