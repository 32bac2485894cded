"""A node as its gateway and its peers see it: real streams, KV endpoint and pool; the engine is a strict fake."""

import asyncio
import contextlib
import socket
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engines.protocol import EngineLost
from kvcache.control import (
    Cancel,
    Cancelled,
    Delta,
    Drain,
    Failed,
    Finished,
    GenerateJob,
    Heartbeat,
    KvSource,
    PrefillDone,
    PrefillJob,
    RateLease,
    Refused,
    Sampling,
    TransferDone,
)
from kvcache.layout import DType
from kvcache.ticket import Ticket, sign_ticket
from kvcache.topology import decode_report
from kvcache.wire import Role
from node import config as parsing
from node.config import ConfigError, KvPort, NodeConfig, TlsFiles
from node.control import NodeRefused
from node.model import NodeModel
from node.node import Node
from tests.fake_engine import FakeEngine
from tests.models import tiny_model
from tests.node.fake_gateway import FakeGateway, heartbeats

CHUNK = 128


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return tiny_model("gemma3_text", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def model(model_dir):
    return NodeModel.read(model_dir, DType.FLOAT32)


class RunningNode:
    """A node, its task, and the engines that it started."""

    def __init__(self, role, model_dir, model, gateway, **changes):
        settings = {
            "role": role,
            "cluster": "local",
            "node_id": role.name.lower(),
            "stream_urls": (parsing.stream_url(gateway.url),),
            "gateway_ca": None,
            "join_token": None,
            "model_dir": model_dir,
            "model_name": "tiny",
            "dtype": DType.FLOAT32,
            "kv_port": parsing.kv_port(role, None, None, 0, None),
            "kv_tls": TlsFiles(),
            "pool_bytes": 8 << 20,
            "threads": 1,
            "chunk_tokens": CHUNK,
            "max_queue": 4,
            "max_running": 4,
            "kv_connections": 3,
        }
        self.engines: list[FakeEngine] = []
        self.refuse_start = False
        self.node = Node(NodeConfig(**(settings | changes)), model, self._start_engine)
        self.stop = asyncio.Event()
        self.task = None

    @property
    def engine(self):
        return self.engines[-1]

    async def _start_engine(self, pool):
        if self.refuse_start:
            raise EngineLost("refused by the test")
        self.engines.append(FakeEngine(self.node._storage.geometry, pool, self.node.room.pool, CHUNK))
        return self.engine

    async def __aenter__(self):
        await self.node.start()
        self.task = asyncio.create_task(self.node.run(self.stop, drain_s=0.3))
        joined = asyncio.create_task(self.node.joined())
        await asyncio.wait((joined, self.task), return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        return self

    async def __aexit__(self, *exc_info):
        self.stop.set()
        with contextlib.suppress(Exception):
            await self.task
        await self.node.close()
        await self.node.close()
        self.node.room.pool.check_integrity()
        assert self.node.room.pool.owners == {}
        assert [fault for engine in self.engines for fault in engine.faults] == []


class Gateway(FakeGateway):
    """Signs tickets and gives out jobs."""

    def __init__(self):
        self.key = Ed25519PrivateKey.generate()
        super().__init__(ticket_key=self.key.public_key().public_bytes_raw())
        self.count = 0

    def joined(self, node):
        return next(join for join in reversed(self.joins) if join.node_id == node)

    def jobs(self, model, tokens=300, seconds=20.0):
        prefill, decode = self.joined("prefill"), self.joined("decode")
        self.count += 1
        now = time.time()
        ids = tuple((n * 7 + self.count) % 500 + 4 for n in range(tokens))
        ticket = Ticket(
            bytes([self.count]) * 16,
            f"r{self.count}",
            1,
            prefill.node_id,
            prefill.incarnation,
            decode.public_key,
            model.fingerprint.digest(),
            0,
            tokens - 1,
            CHUNK,
            model.layout.s_kv(tokens - 1),
            now,
            now + seconds,
        )
        signed = sign_ticket(ticket, self.key)
        source = KvSource(signed, prefill.node_id, prefill.incarnation, prefill.public_key, prefill.kv_address)
        generate = GenerateJob(f"r{self.count}.1", ids, Sampling(8, 0.0), source, now + seconds)
        return ticket, PrefillJob(signed, ids, "lossless"), generate


@contextlib.asynccontextmanager
async def both(model_dir, model, **changes):
    async with (
        Gateway() as gateway,
        RunningNode(Role.PREFILL, model_dir, model, gateway, **changes) as prefill,
        RunningNode(Role.DECODE, model_dir, model, gateway, **changes) as decode,
    ):
        yield gateway, prefill, decode


async def test_two_nodes_carry_a_request_from_order_to_answer(model_dir, model):
    async with both(model_dir, model) as (gateway, _, _):
        ticket, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        finished = await gateway.hears("decode", Finished)
        assert (finished.prompt_tokens, finished.completion_tokens) == (300, 3)
        assert (await gateway.hears("prefill", PrefillDone)).transfer == ticket.transfer
        assert (await gateway.hears("decode", TransferDone)).raw_bytes == model.layout.s_kv(299)
        assert [t for m in gateway.heard["decode"] if isinstance(m, Delta) for t in m.token_ids] == [7, 8, 9]
        await gateway.hears("decode", Heartbeat, lambda beat: any(link.bytes_received for link in beat.links))
        await gateway.hears("decode", Heartbeat, lambda beat: any(link.connections == 3 for link in beat.links))
        await gateway.send("prefill", RateLease(3e9))
        paced = await gateway.hears("prefill", Heartbeat, lambda beat: any(li.paced_bytes_per_s for li in beat.links))
        assert paced.links[0].paced_bytes_per_s == pytest.approx(3e9)


async def test_a_node_says_who_it_is_and_what_it_serves(model_dir, model):
    async with both(model_dir, model, place={"zone": "z"}) as (gateway, prefill, _):
        join = gateway.joined("prefill")
        machine = decode_report(join.topology)
        assert machine.place.zone == "z"
        assert machine.machine == decode_report(gateway.joined("decode").topology).machine
        assert (join.cluster, join.role, join.max_queue) == ("local", Role.PREFILL, 4)
        assert join.kv_address == prefill.node.kv_address
        assert join.kv_address.port > 0
        assert (join.model.name, join.model.fingerprint) == ("tiny", model.fingerprint.parts())
        assert (join.model.chunk_tokens, join.model.vocab_size) == (CHUNK, 512)
        assert gateway.joined("decode").kv_address is None
        beat = await gateway.hears("prefill", Heartbeat)
        assert beat.accepting
        assert beat.pages_total == beat.pages_free > 0
        assert (beat.prefill_tokens_per_s, beat.decode_tokens_per_s) == (1000.0, 10.0)


async def test_a_cancel_is_always_answered(model_dir, model):
    async with both(model_dir, model) as (gateway, prefill, _):
        await gateway.send("prefill", Cancel("ff" * 16))
        assert (await gateway.hears("prefill", Cancelled)).job == "ff" * 16
        prefill.engine.gate.clear()
        ticket, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.hears("prefill", Heartbeat, lambda beat: beat.running == 1)
        await gateway.send("prefill", Cancel(ticket.transfer.hex()))
        await gateway.send("decode", Cancel(generate.generation))
        await gateway.hears("prefill", Cancelled, lambda m: m.job == ticket.transfer.hex())
        await gateway.hears("decode", Cancelled, lambda m: m.job == generate.generation)


async def test_a_lost_gateway_ends_the_jobs_on_both_nodes_and_is_rejoined(model_dir, model):
    async with both(model_dir, model) as (gateway, prefill, decode):
        prefill.engine.hold_at = 1
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.until(lambda: decode.node.room.pool.owners)
        _, unopened, _ = gateway.jobs(model)
        await gateway.send("prefill", unopened)
        await gateway.until(lambda: len(prefill.node.room.pool.owners) == 2)
        before = {node: gateway.joined(node).incarnation for node in ("prefill", "decode")}
        await gateway.stop()
        await gateway.until(lambda: not decode.node.room.pool.owners and not prefill.node.room.pool.owners)
        prefill.engine.hold_at = None
        prefill.engine.gate.set()
        await gateway.listen()
        await gateway.until(lambda: set(gateway.sockets) == {"prefill", "decode"})
        assert {node: gateway.joined(node).incarnation for node in before} == before
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.hears("decode", Finished, lambda m: m.generation == generate.generation)


async def test_a_lost_engine_fails_its_jobs_and_is_replaced(model_dir, model):
    async with both(model_dir, model) as (gateway, prefill, decode):
        prefill.engine.hold_at = 1
        ticket, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.until(lambda: decode.node.room.pool.owners)
        prefill.engine.lose("killed by the test")
        failed = await gateway.hears("prefill", Failed)
        assert (failed.job, failed.stage, failed.cause) == (ticket.transfer.hex(), "prefill", "engine_lost")
        assert (await gateway.hears("decode", Failed)).stage == "transfer"
        down = await gateway.hears("prefill", Heartbeat, lambda beat: not beat.accepting)
        assert "killed by the test" in down.detail
        await gateway.until(lambda: heartbeats(gateway, "prefill")[-1].accepting)
        assert len(prefill.engines) == 2
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.hears("decode", Finished)


async def test_a_draining_node_finishes_what_it_has_and_takes_nothing_new(model_dir, model):
    async with both(model_dir, model) as (gateway, prefill, decode):
        prefill.engine.hold_at = 1
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.until(lambda: decode.node.room.pool.owners)
        await gateway.send("prefill", Drain())
        beat = await gateway.hears("prefill", Heartbeat, lambda beat: not beat.accepting)
        assert beat.detail == "draining"
        ticket, late, _ = gateway.jobs(model)
        await gateway.send("prefill", late)
        failed = await gateway.hears("prefill", Failed)
        assert (failed.job, failed.stage, failed.cause) == (ticket.transfer.hex(), "queue", "draining")
        prefill.engine.gate.set()
        await gateway.hears("decode", Finished)


async def test_a_stopped_node_ends_its_jobs_says_so_and_leaves(model_dir, model):
    async with both(model_dir, model) as (gateway, prefill, decode):
        prefill.engine.hold_at = 1
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.until(lambda: decode.node.room.pool.owners)
        prefill.stop.set()
        await asyncio.wait_for(prefill.task, 5)
        failed = await gateway.hears("prefill", Failed)
        assert failed.cause == "shutdown"
        assert not prefill.node.room.pool.owners
        await gateway.until(lambda: "prefill" not in gateway.sockets)
        assert (await gateway.hears("decode", Failed)).cause == "aborted"


async def test_a_kv_port_that_is_taken_is_named(model_dir, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with Gateway() as gateway:
            running = RunningNode(Role.PREFILL, model_dir, model, gateway, kv_port=KvPort("127.0.0.1", port, None))
            with pytest.raises(ConfigError, match=f"--kv-port {port}: cannot listen there: Address already in use"):
                await running.node.start()
            await running.node.close()


async def test_a_node_that_is_closed_in_mid_transfer_ends_its_jobs_before_its_memory(model_dir, model, caplog):
    async with both(model_dir, model) as (gateway, prefill, decode):
        prefill.engine.hold_at = 1
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.until(lambda: decode.node.room.pool.owners)
        for closing in (prefill, decode):
            await asyncio.wait_for(closing.node.close(), 5)
            assert closing.node.room.pool.owners == {}
            assert closing.engine.faults == []
        assert [record for record in caplog.records if record.exc_info] == []


async def test_a_pool_without_room_is_told_and_frees_itself_at_the_deadline_without_a_new_job(model_dir, model):
    async with both(model_dir, model) as (gateway, prefill, _):
        pool = prefill.node.room.pool
        pool.allocate("another", pool.free_pages)
        ticket, prefill_job, _ = gateway.jobs(model, seconds=1.0)
        await gateway.send("prefill", prefill_job)
        beat = await gateway.hears("prefill", Heartbeat, lambda beat: beat.detail)
        assert (beat.pages_free, beat.queued_jobs) == (0, 1)
        assert beat.detail == "pool full: 1 transfer waits for pages"
        failed = await gateway.hears("prefill", Failed)
        assert (failed.job, failed.cause) == (ticket.transfer.hex(), "deadline")
        prefill.node.room.release("another")
        after = len(heartbeats(gateway, "prefill"))
        await gateway.until(lambda: heartbeats(gateway, "prefill")[after + 1 :])
        beat = heartbeats(gateway, "prefill")[-1]
        assert (beat.detail, beat.pages_free, beat.open_transfers) == ("", beat.pages_total, 0)


async def test_a_dead_peer_does_not_make_a_node_report_itself_unwell(model_dir, model):
    async with both(model_dir, model) as (gateway, prefill, _):
        prefill.engine.hold_at = 1
        _, prefill_job, generate = gateway.jobs(model)
        await gateway.send("decode", generate)
        await gateway.send("prefill", prefill_job)
        await gateway.hears("decode", Heartbeat, lambda beat: beat.links)
        await prefill.node.close()
        assert (await gateway.hears("decode", Failed)).stage == "transfer"
        after = len(heartbeats(gateway, "decode"))
        await gateway.until(lambda: len(heartbeats(gateway, "decode")) > after + 3)
        assert all(beat.accepting and not beat.detail for beat in heartbeats(gateway, "decode"))


@pytest.mark.parametrize(("field", "kept"), [("certificate", False), ("cluster", True)])
async def test_a_node_whose_certificate_was_revoked_joins_anew_when_it_starts_again(model_dir, model, field, kept):
    forgotten = []

    class Renewing:
        run = asyncio.Event().wait

        def refused(self):
            forgotten.append(self)

    async with Gateway() as gateway:
        gateway.refusal = Refused(field, "no more")
        running = RunningNode(Role.PREFILL, model_dir, model, gateway)
        running.node._credentials.renewal = Renewing()
        async with running:
            with pytest.raises(NodeRefused, match="no more"):
                await running.task
    assert bool(forgotten) is not kept


async def test_a_pool_without_a_page_is_refused(model_dir, model):
    async with Gateway() as gateway:
        with pytest.raises(ConfigError, match="--pool-mib"):
            RunningNode(Role.PREFILL, model_dir, model, gateway, pool_bytes=1024)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--model"):
        NodeModel.read(tmp_path, DType.FLOAT32)
