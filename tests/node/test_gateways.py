"""Several gateways, one node: a stream to each, jobs of each, and whoever goes takes only its own away."""

import asyncio
import contextlib

import pytest

from kvcache.control import ChangeRole, Failed, Finished, Heartbeat, Join, ModelInfo, Refused, RoleChanged
from kvcache.control.replicas import Leaving, Siblings
from kvcache.layout import DType
from kvcache.wire import Role
from node import config as parsing
from node import gateways as module
from node.control import ControlLimits, ControlStream, NodeRefused
from node.gateways import Gateways
from node.model import NodeModel
from tests.models import tiny_model
from tests.node.fake_gateway import FakeGateway, heartbeats
from tests.node.test_node import Gateway, RunningNode

QUICK = ControlLimits(connect_s=1.0, silent_s=0.5, first_retry_s=0.02, last_retry_s=0.1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model("gemma3_text", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(model_dir):
    return NodeModel.read(model_dir, DType.FLOAT32)


@contextlib.asynccontextmanager
async def two_and_two(model_dir, model):
    """Two gateways that know nothing of each other, and two nodes that were told of both."""
    async with Gateway() as first, Gateway() as second:
        second.count = 100
        urls = tuple(parsing.stream_url(gateway.url) for gateway in (first, second))
        async with (
            RunningNode(Role.PREFILL, model_dir, model, first, stream_urls=urls) as prefill,
            RunningNode(Role.DECODE, model_dir, model, first, stream_urls=urls) as decode,
        ):
            for gateway in (first, second):
                await gateway.until(lambda here=gateway: set(here.sockets) == {"prefill", "decode"})
            yield first, second, prefill, decode


async def give(gateway, model):
    ticket, prefill_job, generate = gateway.jobs(model)
    await gateway.send("decode", generate)
    await gateway.send("prefill", prefill_job)
    return ticket, generate


async def test_the_jobs_of_a_lost_gateway_end_and_those_of_the_other_go_on(model_dir, model):
    async with two_and_two(model_dir, model) as (first, second, prefill, _):
        prefill.engine.hold_at = 1
        await give(first, model)
        _, mine = await give(second, model)
        for gateway in (first, second):
            beat = await gateway.hears("decode", Heartbeat, lambda beat: beat.others_jobs == 1)
            assert beat.queued_jobs >= 1
            await gateway.hears("prefill", Heartbeat, lambda beat: beat.others_jobs == 1 and beat.others_tokens > 0)
        await first.stop()
        await second.hears("decode", Heartbeat, lambda beat: beat.others_jobs == 0 and beat.queued_jobs == 1)
        prefill.engine.hold_at = None
        prefill.engine.gate.set()
        await second.hears("decode", Finished, lambda m: m.generation == mine.generation)
        assert not [m for m in second.heard["decode"] if isinstance(m, Failed)]
        assert not [m for m in first.heard["decode"] if isinstance(m, Finished)]


async def test_a_role_that_one_gateway_orders_is_told_to_all_and_jobs_on_their_way_are_still_taken(model_dir, model):
    async with two_and_two(model_dir, model) as (first, second, prefill, _):
        order = ChangeRole(Role.DECODE, 7, prefill.node._identity.incarnation, 5.0)
        await first.send("prefill", order)
        await second.hears("prefill", Heartbeat, lambda beat: not beat.accepting and beat.detail == "converting")
        _, generate = await give(second, model)  # it was sent before that was heard
        await second.hears("decode", Finished, lambda m: m.generation == generate.generation)
        assert (await first.hears("prefill", RoleChanged)).changed
        beat = await second.hears("prefill", Heartbeat, lambda beat: beat.role is Role.DECODE)
        assert beat.role_epoch == 7
        assert not [m for m in second.heard["prefill"] if isinstance(m, RoleChanged | Failed)]


async def test_the_order_of_a_lost_gateway_is_given_up_and_an_older_epoch_of_another_is_stale(model_dir, model):
    async with two_and_two(model_dir, model) as (first, second, prefill, _):
        prefill.engine.hold_at = 1
        await give(second, model)
        await second.hears("prefill", Heartbeat, lambda beat: beat.running == 1)
        incarnation = prefill.node._identity.incarnation
        await first.send("prefill", ChangeRole(Role.DECODE, 7, incarnation, 30.0))
        await second.hears("prefill", Heartbeat, lambda beat: not beat.accepting)
        await first.stop()
        await second.until(lambda: heartbeats(second, "prefill")[-1].accepting)
        await second.send("prefill", ChangeRole(Role.DECODE, 6, incarnation, 0.1))
        assert (await second.hears("prefill", RoleChanged)).cause == "stale_epoch"
        prefill.engine.hold_at = None
        prefill.engine.gate.set()
        await second.hears("decode", Finished)


# ---- who is joined


class Handler:
    """A node of which only the streams exist."""

    def __init__(self):
        self.lost = []

    def join(self):
        model = ModelInfo("tiny", {}, 100, 128, 512)
        return Join("n", "i", "local", Role.DECODE, bytes(32), None, model, "1", 4)

    def heartbeat(self, gateway):
        return Heartbeat(True, 0, 0, 0, 1, 1, 0.0, 0.0, 0)

    def on_welcome(self, gateway, welcome):
        pass

    def on_order(self, gateway, order):
        raise AssertionError(order)

    def on_disconnected(self, gateway, cause):
        self.lost.append(gateway)


@contextlib.asynccontextmanager
async def joined(*named):
    urls = [parsing.stream_url(url) for url in named]
    gateways = Gateways(urls, Handler(), lambda url, handler: ControlStream(url, handler, limits=QUICK))
    task = asyncio.create_task(gateways.run())
    try:
        yield gateways, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def fakes(*ids):
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for name in ids:
            found.append(await stack.enter_async_context(FakeGateway()))
            found[-1].gateway_id = name
        yield found


async def test_one_address_suffices_where_gateways_tell_of_each_other():
    async with fakes("a", "b") as (a, b), joined(a.url) as (gateways, _):
        await a.until(lambda: a.sockets)
        await a.send("n", Siblings((b.url,)))
        await b.until(lambda: b.sockets)
        assert b.joins[0].gateways == ("a",)
        assert b.joins[0].siblings
        await b.send("n", Siblings((a.url,)))
        await a.stop()
        await a.until(lambda: len(gateways.joined) == 1)
        await asyncio.sleep(0.05)
        assert b.sockets


async def test_whoever_takes_over_an_address_is_joined_while_the_one_that_leaves_is_served_to_its_end():
    async with fakes("a") as (a,), joined(a.url) as (gateways, _):
        await a.until(lambda: a.sockets and gateways.joined)
        url, leaving = gateways.joined[0], a.sockets["n"]
        a.gateway_id = "b"
        await a.send("n", Leaving())
        await a.until(lambda: len(gateways.joined) == 2)
        assert gateways.joined == [url, f"{url}#1"]
        assert a.joins[1].gateways == ("a",)
        await leaving.close()
        await a.until(lambda: gateways.joined == [f"{url}#1"])
        await asyncio.sleep(0.2)  # twice its longest pause
        assert len(a.joins) == 2, "the session that ended is not begun again"
        a.gateway_id = "c"
        await a.send("n", Leaving())
        await a.until(lambda: gateways.joined == [f"{url}#1", f"{url}#2"])


async def test_a_gateway_that_nobody_speaks_of_any_more_is_forgotten_once_it_is_gone():
    async with fakes("a", "b") as (a, b), joined(a.url) as (gateways, _):
        await a.until(lambda: a.sockets)
        await a.send("n", Siblings((b.url,)))
        await b.until(lambda: b.sockets)
        await a.send("n", Siblings(()))
        await asyncio.sleep(0.05)
        assert len(gateways.joined) == 2  # it works, whatever is said of it
        await b.stop()
        await b.until(lambda: len(gateways._sessions) == 1)


async def test_two_addresses_of_one_gateway_make_one_stream():
    async with fakes("a") as (a,), joined(a.url, a.url.replace("127.0.0.1", "localhost")) as (gateways, _):
        await a.until(lambda: len([j for j in a.joins if j.gateways == ("a",)]) >= 2)
        assert len(gateways.joined) == 1
        assert gateways.ids() == ("a",)


async def test_a_sibling_that_may_not_be_spoken_with_in_the_clear_is_left_out(caplog):
    async with fakes("a") as (a,), joined(a.url) as (gateways, task):
        await a.until(lambda: a.sockets)
        await a.send("n", Siblings(("http://192.0.2.1:8000", "nonsense")))
        await a.until(lambda: caplog.text.count("is not joined") == 2)
        assert len(gateways._sessions) == 1
        assert not task.done()


async def test_the_refusal_of_a_named_gateway_ends_the_node_and_that_of_another_does_not(monkeypatch):
    monkeypatch.setattr(module, "REFUSED_RETRY_S", 0.05)
    async with fakes("a", "b") as (a, b), joined(a.url) as (_, task):
        b.refusal = Refused("fingerprint", "another model")
        await a.until(lambda: a.sockets)
        await a.send("n", Siblings((b.url,)))
        await b.until(lambda: len(b.joins) >= 2)
        b.refusal = None
        await b.until(lambda: b.sockets)
        a.refusal = Refused("cluster", "was removed")
        await a.stop()
        await a.listen()
        with pytest.raises(NodeRefused, match="was removed"):
            await asyncio.wait_for(asyncio.shield(task), 5)
