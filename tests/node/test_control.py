"""The control stream: joined, beaten, lost, rejoined; never waited for and never trusted with more than it is."""

import asyncio
import contextlib

import pytest

from kvcache.control import Cancel, Cancelled, Delta, Heartbeat, Join, ModelInfo, Refused, Welcome
from kvcache.wire import Role
from node.backoff import Backoff
from node.config import stream_url
from node.control import ControlLimits, ControlStream, CredentialsRefused, NodeRefused
from tests.node.fake_gateway import FakeGateway, heartbeats

QUICK = ControlLimits(connect_s=1.0, silent_s=0.5, first_retry_s=0.02, last_retry_s=0.1)


class Handler:
    """A node of which only the stream exists."""

    def __init__(self) -> None:
        self.welcomes: list[Welcome] = []
        self.orders: list[object] = []
        self.lost: list[str] = []
        self.accepting = True

    def join(self) -> Join:
        model = ModelInfo("tiny", {}, 100, 128, 512)
        return Join("n", "i", "local", Role.DECODE, bytes(32), None, model, "1", 4)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.accepting, 0, 0, 0, 1, 1, 0.0, 0.0, 0)

    def on_welcome(self, welcome: Welcome) -> None:
        self.welcomes.append(welcome)

    def on_order(self, order: object) -> None:
        self.orders.append(order)

    def on_disconnected(self, cause: str) -> None:
        self.lost.append(cause)


@contextlib.asynccontextmanager
async def running(gateway: FakeGateway, limits: ControlLimits = QUICK, **options):
    handler = Handler()
    stream = ControlStream(stream_url(gateway.url), handler, limits=limits, **options)
    task = asyncio.create_task(stream.run())
    try:
        yield handler, stream, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_node_joins_and_beats_as_often_as_the_gateway_asks():
    async with FakeGateway() as gateway, running(gateway) as (handler, stream, _):
        await gateway.until(lambda: len(heartbeats(gateway, "n")) >= 4)
        assert stream.joined
        assert gateway.joins == [handler.join()]
        assert len(handler.welcomes) == 1


async def test_a_change_is_told_at_once():
    async with FakeGateway() as gateway:
        gateway.beat_s = 0.4
        async with running(gateway) as (handler, stream, _):
            await gateway.hears("n", Heartbeat)
            handler.accepting = False
            stream.beat_now()
            await gateway.hears("n", Heartbeat, lambda beat: not beat.accepting, within=0.2)


async def test_orders_reach_the_node_and_messages_the_gateway_in_order():
    async with FakeGateway() as gateway, running(gateway) as (handler, stream, _):
        await gateway.until(lambda: stream.joined)
        await gateway.send("n", Cancel("a"))
        await gateway.send("n", Cancel("b"))
        await gateway.until(lambda: handler.orders == [Cancel("a"), Cancel("b")])
        for n in range(100):
            stream.send(Delta("g", str(n), (n,)))
        await gateway.hears("n", Delta, lambda delta: delta.text == "99")
        assert [m.text for m in gateway.heard["n"] if isinstance(m, Delta)] == [str(n) for n in range(100)]


async def test_a_silent_gateway_is_left_and_rejoined():
    async with FakeGateway() as gateway, running(gateway) as (handler, stream, _):
        await gateway.until(lambda: stream.joined)
        gateway.beating = False
        await gateway.until(lambda: handler.lost)
        assert "nothing heard" in handler.lost[0]
        gateway.beating = True
        await gateway.until(lambda: len(gateway.joins) >= 2 and stream.joined)


async def test_a_gateway_that_restarts_is_joined_again_by_the_same_incarnation():
    async with FakeGateway() as gateway, running(gateway) as (handler, stream, _):
        await gateway.until(lambda: stream.joined)
        await gateway.stop()
        await gateway.until(lambda: handler.lost)
        assert not stream.joined
        stream.send(Cancelled("of the old session"))
        await asyncio.sleep(0.2)
        await gateway.listen()
        await gateway.until(lambda: len(gateway.joins) == 2 and stream.joined)
        assert gateway.joins[0] == gateway.joins[1]
        await gateway.until(lambda: len(heartbeats(gateway, "n")) > 3)
        assert not [m for m in gateway.heard["n"] if isinstance(m, Cancelled)]


async def test_a_node_that_starts_before_its_gateway_waits_for_it():
    gateway = FakeGateway()
    await gateway.listen()
    await gateway.stop()
    async with running(gateway) as (_, stream, _):
        await asyncio.sleep(0.1)
        await gateway.listen()
        await gateway.until(lambda: stream.joined)
    await gateway.stop()


async def test_a_refused_node_stops_and_names_the_field():
    async with FakeGateway() as gateway:
        gateway.refusal = Refused("fingerprint.dtype", "the gateway serves bfloat16")
        async with running(gateway) as (_, _, task):
            with pytest.raises(NodeRefused, match=r"fingerprint\.dtype: the gateway serves bfloat16"):
                await asyncio.wait_for(task, 5)
        assert len(gateway.joins) == 1


async def test_a_wrong_join_token_stops_the_node_and_the_right_one_joins():
    async with FakeGateway(token="right") as gateway:
        async with running(gateway, join_token="wrong") as (_, _, task):
            with pytest.raises(CredentialsRefused, match="--join-token-file"):
                await asyncio.wait_for(task, 5)
        async with running(gateway, join_token="right") as (_, stream, _):
            await gateway.until(lambda: stream.joined)


async def test_a_gateway_that_is_not_ready_is_tried_again():
    async with FakeGateway() as gateway:
        gateway.status = 503
        async with running(gateway) as (_, stream, _):
            await asyncio.sleep(0.1)
            gateway.status = None
            await gateway.until(lambda: stream.joined)


async def test_a_message_that_does_not_decode_ends_the_session():
    async with FakeGateway() as gateway, running(gateway) as (handler, stream, _):
        await gateway.until(lambda: stream.joined)
        await gateway.sockets["n"].send_bytes(b"\xc1")
        await gateway.until(lambda: handler.lost)
        assert "protocol" in handler.lost[0]
        await gateway.until(lambda: len(gateway.joins) == 2)


async def test_a_second_welcome_ends_the_session():
    async with FakeGateway() as gateway, running(gateway) as (handler, stream, _):
        await gateway.until(lambda: stream.joined)
        await gateway.send("n", Welcome(bytes(32), 0.1, 3.5))
        await gateway.until(lambda: handler.lost)


async def test_a_gateway_that_does_not_read_is_left_before_the_backlog_grows():
    async with FakeGateway() as gateway:
        gateway.reading = False
        limits = ControlLimits(silent_s=5.0, first_retry_s=0.02, backlog_bytes=1 << 20)
        async with running(gateway, limits) as (handler, stream, _):
            await gateway.until(lambda: stream.joined)
            for _ in range(40):
                stream.send(Delta("g", "x" * (1 << 18), ()))
            await gateway.until(lambda: handler.lost)
            assert "unread" in handler.lost[0]


async def test_flush_returns_when_all_is_written():
    async with FakeGateway() as gateway, running(gateway) as (_, stream, _):
        await gateway.until(lambda: stream.joined)
        stream.send(Cancelled("last words"))
        await stream.flush(1.0)
        await gateway.hears("n", Cancelled)


def test_pauses_double_up_to_their_bound_and_start_over_after_success():
    backoff = Backoff(0.5, 4.0, uniform=lambda low, high: high)
    assert [backoff.next_delay() for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    backoff.reset()
    assert backoff.next_delay() == 0.5


def test_pauses_of_different_nodes_differ_within_their_step():
    delays = {Backoff(1.0, 8.0).next_delay() for _ in range(20)}
    assert len(delays) > 10
    assert all(0.5 <= delay <= 1.0 for delay in delays)
