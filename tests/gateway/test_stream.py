"""The control stream: who may join and why not, beats, reconnects, and nodes that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import websockets

from gateway import stream
from gateway.clusters import Dial
from gateway.joining.stream_protocol import STREAM
from gateway.sessions import NodeLost, NodeSession
from kvcache import control
from kvcache.control import Beat, Cancel, GenerateJob, Heartbeat, Join, KvAddress, ModelInfo, PrefillJob, RateLease
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, never

replace = msgspec.structs.replace


async def refusal(one: Stage, name: str, role: Role, **options: Any) -> tuple[str, str]:
    node = await one.node(name, role, **options)
    assert node.refused is not None
    return node.refused.field, node.refused.reason


@pytest.mark.parametrize("part", ["weights", "tokenizer", "layout", "dtype"])
async def test_a_fingerprint_that_differs_is_refused_naming_the_part(stage: Open, info: ModelInfo, part: str) -> None:
    one = await stage()
    other = replace(info, fingerprint=info.fingerprint | {part: "other"})
    field, reason = await refusal(one, "p", Role.PREFILL, model=other)
    assert field == f"fingerprint.{part}"
    assert part in reason


async def test_a_fingerprint_that_lacks_a_part_is_refused(stage: Open, info: ModelInfo) -> None:
    one = await stage()
    parts = {name: value for name, value in info.fingerprint.items() if name != "dtype"}
    assert (await refusal(one, "p", Role.PREFILL, model=replace(info, fingerprint=parts)))[0] == "fingerprint"


@pytest.mark.parametrize("field", ["chunk_tokens", "context_tokens"])
async def test_grid_and_context_must_be_equal_on_all_nodes(stage: Open, info: ModelInfo, field: str) -> None:
    one = await stage()
    first = await one.node("p", Role.PREFILL)
    changed = replace(info, **{field: 128})
    refused, reason = await refusal(one, "d", Role.DECODE, model=changed)
    assert refused == field
    assert "'p'" in reason
    await first.stop()
    await one.until(lambda: one.gateway.registry.node("p") is None)
    assert (await one.node("d", Role.DECODE, model=changed)).refused is None


async def test_an_unknown_cluster_is_refused_with_the_cure(stage: Open) -> None:
    one = await stage()
    field, reason = await refusal(one, "p", Role.PREFILL, cluster="east")
    assert field == "cluster"
    assert "prfaas clusters register east" in reason


async def test_decode_nodes_join_the_local_cluster_only(stage: Open) -> None:
    one = await stage()
    one.register("east")
    assert (await refusal(one, "d", Role.DECODE, cluster="east"))[0] == "role"


async def test_two_that_only_dial_are_refused_whoever_comes_second(stage: Open) -> None:
    one = await stage()
    await one.node("d", Role.DECODE, kv=False)
    assert (await refusal(one, "p", Role.PREFILL, kv=False))[0] == "dial"
    assert (await one.node("p", Role.PREFILL, kv=True)).refused is None


async def test_a_cluster_that_only_dials_is_refused_while_the_decode_nodes_only_dial(stage: Open) -> None:
    one = await stage()
    await one.node("d", Role.DECODE, kv=False)
    answer = await one.client.post("/v1/clusters", json={"name": "east", "dial": "out"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dial")


@pytest.mark.parametrize(("dial", "kv"), [(Dial.IN, False), (Dial.OUT, True)])
async def test_a_node_must_be_reachable_as_its_cluster_was_registered(stage: Open, dial: Dial, kv: bool) -> None:
    one = await stage()
    one.gateway.registry.register("east", dial)
    assert (await refusal(one, "p", Role.PREFILL, cluster="east", kv=kv))[0] == "dial"


async def test_a_second_process_of_the_same_name_is_refused_while_the_first_lives(stage: Open) -> None:
    one = await stage()
    first = await one.node("p", Role.PREFILL)
    field, _ = await refusal(one, "p", Role.PREFILL, incarnation="x")
    assert field == "node_id"
    first.abort()
    await one.until(lambda: one.gateway.registry.node("p") is None)
    assert (await one.node("p", Role.PREFILL, incarnation="x")).refused is None


async def test_the_same_incarnation_with_another_key_is_refused(stage: Open) -> None:
    one = await stage()
    await one.node("p", Role.PREFILL)
    assert (await refusal(one, "p", Role.PREFILL))[0] == "public_key"


async def test_a_reconnect_replaces_the_old_stream_and_ends_its_jobs(stage: Open) -> None:
    one = await stage()
    decode = await one.node("d", Role.DECODE, on_generate=never)
    request = asyncio.create_task(one.complete())
    await one.until(lambda: decode.jobs(GenerateJob))
    again = FakeNode(one.url, "d", Role.DECODE, one.info)
    again.key, again.join = decode.key, decode.join
    await again.start()
    one.nodes.append(again)
    await one.until(lambda: (s := one.gateway.registry.node("d")) is not None and s.accepting)
    assert (await request).status_code == 503
    assert (await one.complete()).status_code == 200
    assert len(again.jobs(GenerateJob)) == 1
    async with asyncio.timeout(3):
        await decode.ws.wait_closed()
    assert one.gateway.registry.node("d") is not None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"node_id": "bad name"}, "node_id"),
        ({"node_id": ""}, "node_id"),
        ({"node_id": "n" * 64}, "node_id"),
        ({"incarnation": ""}, "incarnation"),
        ({"public_key": b"short"}, "public_key"),
        ({"max_queue": 0}, "max_queue"),
    ],
)
async def test_a_join_with_a_bad_field_is_refused_naming_it(stage: Open, change: dict[str, Any], field: str) -> None:
    one = await stage()
    node = FakeNode(one.url, "p", Role.PREFILL, one.info)
    node.join = replace(node.join, **change)
    await node.start()
    assert node.refused is not None
    assert node.refused.field == field


async def test_beats_come_every_second(stage: Open) -> None:
    one = await stage(beat_s=0.1)
    node = await one.node("d", Role.DECODE)
    await asyncio.sleep(0.55)
    assert 3 <= node.beats <= 6
    assert node.welcome is not None
    assert (node.welcome.beat_s, node.welcome.lease_s) == (0.1, 3.5)


async def test_a_node_that_says_nothing_is_lost_after_its_lease(stage: Open) -> None:
    one = await stage(lease_s=0.6)
    node = await one.node("d", Role.DECODE)
    node.beating = False
    began = time.monotonic()
    await one.until(lambda: one.gateway.registry.node("d") is None)
    assert 0.4 <= time.monotonic() - began < 1.5


async def test_a_node_that_stops_reading_does_not_hold_the_gateway(stage: Open) -> None:
    """Its socket fills, its silence ends it, and the others go on."""
    one = await stage(lease_s=0.6)
    node = await one.node("p", Role.PREFILL, on_prefill=never)
    await one.node("d", Role.DECODE)
    node.ws.transport.pause_reading()
    session = one.gateway.registry.node("p")
    assert session is not None
    for _ in range(40):
        session.send(PrefillJob(b"", tuple(range(100_000, 200_000)), "raw"))
    node.beating = False
    await one.until(lambda: one.gateway.registry.node("p") is None, 4.0)
    assert (await one.complete()).status_code == 200
    node.abort()


async def test_a_backlog_beyond_its_bound_ends_the_session_instead_of_growing(stage: Open) -> None:
    one = await stage()
    await one.node("p", Role.PREFILL)
    session = one.gateway.registry.node("p")
    assert session is not None
    session.say = lambda data: False  # as where its socket takes no more
    big = PrefillJob(b"\0" * (8 << 20), (), "raw")
    sent = 0
    while session.lost is None and sent < 20:
        with contextlib.suppress(NodeLost):
            session.send(big)
        sent += 1
    assert session.lost == "backlog"
    assert sent <= 9


Misuse = Callable[[Any], Awaitable[None]]


async def garbage(ws: Any) -> None:
    await ws.send(b"\xc1garbage")


async def text(ws: Any) -> None:
    await ws.send("hello")


async def order(ws: Any) -> None:
    await ws.send(control.encode(Beat()))


@pytest.mark.parametrize("misuse", [garbage, text, order])
async def test_what_is_no_join_closes_the_stream_at_once(stage: Open, misuse: Misuse) -> None:
    one = await stage()
    async with websockets.connect(one.url.replace("http", "ws") + "/v1/nodes/stream") as ws:
        await misuse(ws)
        async with asyncio.timeout(3):
            await ws.wait_closed()
    assert not one.gateway.registry.nodes()


@pytest.mark.parametrize("misuse", [garbage, text, order])
async def test_a_joined_node_that_breaks_the_protocol_is_lost(stage: Open, misuse: Misuse) -> None:
    one = await stage()
    node = await one.node("d", Role.DECODE)
    await misuse(node.ws)
    await one.until(lambda: one.gateway.registry.node("d") is None)


BAD_JOINS: list[tuple[str, dict[str, Any]]] = [
    ("kv_address", {"kv_address": KvAddress("host\n", 7)}),
    ("kv_address", {"kv_address": KvAddress("", 7)}),
    ("kv_address", {"kv_address": KvAddress("h" * 300, 7)}),
    ("kv_address", {"kv_address": KvAddress("host", 0)}),
    ("kv_address", {"kv_address": KvAddress("host", 65536)}),
    ("incarnation", {"incarnation": "a\nb"}),
    ("version", {"version": "v" * 1000}),
    ("version", {"version": "\x1b[2J"}),
    ("max_queue", {"max_queue": 1 << 40}),
    ("node_id", {"node_id": "east\n"}),
]


@pytest.mark.parametrize(("field", "change"), BAD_JOINS, ids=lambda v: str(v)[:40])
async def test_a_join_that_nobody_could_work_with_is_refused_by_field(
    stage: Open, info: ModelInfo, field: str, change: dict[str, Any]
) -> None:
    one = await stage()
    node = FakeNode(one.url, "p", Role.PREFILL, info)
    node.join = replace(node.join, **change)
    await node.start()
    assert (node.refused or control.Refused("", "")).field == field
    await node.stop()


async def test_a_node_that_talks_but_does_not_read_is_lost(stage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "UNREAD_S", 0.5)
    one = await stage()
    node = await one.node("d", Role.DECODE)
    node.ws.transport.pause_reading()
    session = one.gateway.registry.node("d")
    assert session is not None
    for _ in range(60):
        session.send(PrefillJob(b"", tuple(range(100_000, 300_000)), "raw"))
    await one.until(lambda: session.lost is not None)
    assert session.lost == "does not read"


async def test_a_stream_that_is_closed_under_a_write_is_a_lost_node_and_no_error_of_ours(
    stage: Open, info: ModelInfo, caplog: pytest.LogCaptureFixture
) -> None:
    one = await stage()
    join = FakeNode(one.url, "d", Role.DECODE, info).join
    events = [{"type": "websocket.connect"}, {"type": "websocket.receive", "bytes": control.encode(join)}]

    async def receive() -> dict[str, Any]:
        if not events:
            await asyncio.Event().wait()
        return events.pop(0)

    async def send(event: Any) -> None:
        if event["type"] == "websocket.send":
            raise OSError

    class Deaf:
        def listen(self, hear: Any) -> None:
            pass

        def say(self, data: bytes) -> bool:
            return False

    scope = {"client": ("127.0.0.1", 1), "headers": [(b"host", b"localhost")], "state": {STREAM: Deaf()}}
    async with asyncio.timeout(3):
        await one.gateway._streams.serve(scope, receive, send)
    assert one.gateway.registry.node("d") is None
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_message_before_join_is_refused(stage: Open) -> None:
    one = await stage()
    async with websockets.connect(one.url.replace("http", "ws") + "/v1/nodes/stream") as ws:
        await ws.send(control.encode(Heartbeat(True, 0, 0, 0, 0, 0, 0.0, 0.0, 0)))
        refused = control.decode_to_node(await ws.recv())
    assert isinstance(refused, control.Refused)
    assert refused.field == "join"


async def test_with_a_join_token_only_its_holders_get_in(stage: Open) -> None:
    one = await stage(join_token="open sesame")
    assert (await one.node("p", Role.PREFILL, token="open sesame")).refused is None
    for token in (None, "open", "open sesame "[:-1] + "!"):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await one.node("q", Role.PREFILL, token=token)
        assert refused.value.response.status_code == 403


async def test_a_page_in_a_browser_cannot_join_without_a_token(stage: Open) -> None:
    one = await stage()
    with pytest.raises(websockets.InvalidStatus):
        await websockets.connect(one.url.replace("http", "ws") + "/v1/nodes/stream", origin="https://evil.example")


async def test_other_websocket_paths_do_not_exist(stage: Open) -> None:
    one = await stage()
    with pytest.raises(websockets.InvalidStatus):
        await websockets.connect(one.url.replace("http", "ws") + "/v1/other")


async def test_the_nodes_of_a_cluster_share_its_registered_way_out(stage: Open) -> None:
    one = await stage()
    await one.client.post("/v1/clusters", json={"name": "east", "egress_gbps": 8.0})
    first, second = [await one.node(name, Role.PREFILL, cluster="east") for name in ("p1", "p2")]
    home = await one.node("p3", Role.PREFILL)

    async def leased(node: FakeNode, rate: float) -> None:
        await one.until(lambda: node.jobs(RateLease) and node.jobs(RateLease)[-1].egress_bytes_per_s == rate)

    for node in (first, second):
        await leased(node, 1e9)
    first.beating = second.beating = False
    await first.heartbeat(open_transfers=1)
    await second.heartbeat(open_transfers=2)
    await leased(second, 5e8)
    await first.heartbeat(open_transfers=1)
    await leased(first, 5e8)
    assert home.jobs(RateLease) == []
    assert (await one.client.get("/v1/clusters/east")).json()["egress_gbps"] == 8.0


async def test_what_operators_see_of_nodes_and_clusters(stage: Open) -> None:
    one = await stage()
    await one.pair("east")
    listed = (await one.client.get("/v1/nodes")).json()["nodes"]
    assert [(n["node_id"], n["cluster"], n["role"], n["accepting"]) for n in listed] == [
        ("d", "local", "decode", True),
        ("p-east", "east", "prefill", True),
    ]
    assert (await one.complete(words=60)).status_code == 200
    east = (await one.client.get("/v1/clusters/east")).json()
    assert (east["nodes"], east["accepting"], east["state"]) == (1, 1, "active")
    assert east["link"]["bytes_per_s"] == pytest.approx(128 / 0.02)
    assert east["link"]["queued_bytes"] == 0
    status = (await one.client.get("/v1/status")).json()
    assert (status["ready"], status["prefill_nodes"], status["decode_nodes"]) == (True, 1, 1)
    assert status["chunk_tokens"] == 256


def test_a_join_of_a_newer_node_with_unknown_fields_still_parses(info: ModelInfo) -> None:
    join = Join("p", "i", "local", Role.PREFILL, b"\0" * 32, None, info, "9", 1)
    plain = msgspec.msgpack.decode(control.encode(join)) | {"new_field": 1}
    assert control.decode_from_node(msgspec.msgpack.encode(plain)) == join


async def test_what_had_to_wait_is_sent_before_what_follows(info: ModelInfo) -> None:
    session = NodeSession(FakeNode("http://gateway", "d", Role.DECODE, info).join, 0.0)
    said: list[bytes] = []
    free = False

    def say(data: bytes) -> bool:
        if free:
            said.append(data)
        return free

    session.say = say
    orders = [Cancel(f"job{number}") for number in range(4)]
    session.send(orders[0])
    free = True
    session.send(orders[1])
    assert said == []
    assert [await session.next_outbound(0.0), await session.next_outbound(0.0)] == list(map(control.encode, orders[:2]))
    session.send(orders[2])
    assert said == [], "the second may still be on its way"
    assert await session.next_outbound(0.0) == control.encode(orders[2])
    assert await session.next_outbound(0.0) is None
    session.send(orders[3])
    assert said == [control.encode(orders[3])]
