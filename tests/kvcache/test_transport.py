"""Peers over real sockets: one connection for each pair, direct payloads, and an end to everything that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvcache.control import KvAddress
from kvcache.framing import FrameParser
from kvcache.session import Session
from kvcache.transfer import TransferViolation
from kvcache.transport import (
    InsecureBind,
    KvEndpoint,
    Peer,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    TransportLimits,
)
from kvcache.transport.dialler import Backoff
from kvcache.transport.link import RateMeter
from kvcache.wire import Abort, Ack, Data, Frame, Grant, Kind, Open, encode_frame, header
from tests.kvcache.kvnet import (
    QUICK,
    Net,
    Proxy,
    Recorder,
    T,
    data,
    key_of,
    local,
    send_data,
    soon,
    until,
    who,
)

MIB = 1 << 20


@pytest_asyncio.fixture
async def net() -> AsyncIterator[Net]:
    endpoints: list[KvEndpoint] = []

    async def make(name: str, **options: object) -> tuple[KvEndpoint, Recorder]:
        limits = options.pop("limits", QUICK)
        dial_ssl = options.pop("dial_ssl", None)
        recorder = Recorder()
        endpoint = KvEndpoint(local(name, **options), recorder, dial_ssl, limits)  # type: ignore[arg-type]
        endpoints.append(endpoint)
        return endpoint, recorder

    yield make
    for endpoint in endpoints:
        await endpoint.close()


async def pair(net: Net, limits: TransportLimits = QUICK) -> tuple[Peer, Recorder, Peer, Recorder]:
    """Node a has dialled node b: both ends of the connection and their handlers."""
    a, on_a = await net("a", limits=limits)
    b, on_b = await net("b", limits=limits)
    port = await b.listen("127.0.0.1", 0)
    at_a = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    at_b = await b.peer(who("a"), None, soon())
    return at_a, on_a, at_b, on_b


async def refusal(stream: asyncio.StreamReader) -> Abort:
    """The Abort that ends a refused handshake, after whatever came before it."""
    parser = FrameParser()
    rest = await asyncio.wait_for(stream.read(), 5)
    parser.get_buffers()[0][: len(rest)] = rest
    parser.buffer_updated(len(rest))
    frames: list[Frame] = []
    while (frame := parser.next_frame()) is not None:
        frames.append(frame)
    assert isinstance(frames[-1], Abort)
    return frames[-1]


# ---- connecting


async def test_frames_pass_both_ways_once_both_are_proved(net: Net) -> None:
    at_a, on_a, at_b, on_b = await pair(net)
    at_a.send(Open(b"ticket", ("raw",)))
    at_b.send(Grant(T))
    await until(lambda: on_a.frames and on_b.frames)
    assert on_b.frames == [Open(b"ticket", ("raw",))]
    assert on_a.frames == [Grant(T)]
    assert at_a.identity.public_key == key_of("b").public_key().public_bytes_raw()
    assert at_b.identity.node_id == "a"
    assert [c.dialled for c in (*at_a.connections, *at_b.connections)] == [True, False]


async def test_all_callers_share_one_connection(net: Net) -> None:
    a, _ = await net("a")
    b, _ = await net("b")
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    peers = await asyncio.gather(*(a.peer(who("b"), address, soon()) for _ in range(20)))
    assert set(peers) == {await a.peer(who("b"), None, soon())}
    assert len(a.links()) == len(b.links()) == 1


async def test_both_dialling_at_once_share_what_they_made(net: Net) -> None:
    (a, _), (b, on_b) = await net("a"), await net("b")
    ports = [await end.listen("127.0.0.1", 0) for end in (a, b)]
    await asyncio.gather(
        a.peer(who("b"), KvAddress("127.0.0.1", ports[1]), soon()),
        b.peer(who("a"), KvAddress("127.0.0.1", ports[0]), soon()),
    )
    await asyncio.sleep(0.1)
    (await a.peer(who("b"), None, soon())).send(Grant(T))
    await until(lambda: on_b.frames)
    assert len(a.links()) == len(b.links()) == 1


async def test_a_node_that_only_accepts_waits_until_it_is_dialled(net: Net) -> None:
    (a, _), (b, _) = await net("a"), await net("b")
    port = await b.listen("127.0.0.1", 0)
    waiting = asyncio.create_task(b.peer(who("a"), None, soon()))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    assert (await waiting).identity.node_id == "a"


async def test_waiting_and_dialling_end_at_the_deadline_and_say_why(net: Net) -> None:
    a, _ = await net("a")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = KvAddress("127.0.0.1", unused.getsockname()[1])
        began = time.monotonic()
        for dial, cause in ((None, "did not dial in"), (closed, "refused")):
            with pytest.raises(PeerUnreachable, match=cause):
                await a.peer(who("b"), dial, soon(0.3))
        assert time.monotonic() - began < 1.5
    await until(lambda: not a._tasks)


async def test_a_dial_goes_on_until_the_peer_is_there(net: Net) -> None:
    (a, _), (b, _) = await net("a"), await net("b")
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    dialling = asyncio.create_task(a.peer(who("b"), KvAddress("127.0.0.1", port), soon()))
    await asyncio.sleep(0.2)
    await b.listen("127.0.0.1", port)
    assert (await dialling).alive


async def test_an_unreachable_peer_holds_up_no_other(net: Net) -> None:
    a, _ = await net("a", limits=replace(QUICK, handshake_s=5.0))
    b, _ = await net("b")
    port = await b.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = KvAddress("127.0.0.1", mute.getsockname()[1])
        stuck = [asyncio.create_task(a.peer(who(f"m{n}"), address, soon(1.0))) for n in range(20)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
        assert time.monotonic() - began < 0.5
        outcomes = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)


async def test_a_dial_that_hangs_holds_up_no_other(net: Net) -> None:
    a, _ = await net("a", limits=replace(QUICK, connect_s=5.0))
    b, _ = await net("b")
    port = await b.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as callers:
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        address = KvAddress("127.0.0.1", full.getsockname()[1])
        stuck = [asyncio.create_task(a.peer(who(f"m{n}"), address, soon(1.0))) for n in range(5)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
        assert time.monotonic() - began < 0.5
        outcomes = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)


def test_pauses_between_attempts_grow_are_jittered_and_bounded() -> None:
    spans = []
    for seed in range(20):
        backoff = Backoff(0.1, 2.0, random.Random(seed))
        assert backoff.remaining(0.0) == 0.0
        mine = []
        for _ in range(40):
            backoff.failed(0.0, "no")
            mine.append(backoff.remaining(0.0))
        assert all(min(2.0, 0.1 * 2**n) / 2 <= span <= min(2.0, 0.1 * 2**n) for n, span in enumerate(mine))
        spans.append(tuple(mine))
    assert len(set(spans)) == 20


async def test_a_refused_address_is_not_stormed(net: Net) -> None:
    a, _ = await net("a", limits=replace(QUICK, backoff_most_s=2.0))
    attempts = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = KvAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    for _ in range(5):
        with pytest.raises(PeerUnreachable):
            await asyncio.gather(*(a.peer(who("b"), address, soon(0.2)) for _ in range(10)))
    server.close()
    assert 2 <= attempts <= 7


# ---- who may connect


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"fingerprint": "other"}, "fingerprint"), ({"incarnation": "2"}, "incarnation")],
)
async def test_a_peer_that_differs_is_refused_and_both_sides_name_the_field(
    net: Net, changes: dict[str, str], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcache.transport")
    (a, _), (b, _) = await net("a"), await net("b", **changes)
    port = await b.listen("127.0.0.1", 0)
    with pytest.raises(PeerRefused) as caught:
        await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    assert caught.value.field == field
    await until(lambda: any("inbound_refused" in r.message and field in r.message for r in caplog.records))
    assert not b.links()


async def test_another_node_at_the_address_is_refused(net: Net) -> None:
    (a, _), (b, _) = await net("a"), await net("b")
    port = await b.listen("127.0.0.1", 0)
    with pytest.raises(PeerRefused, match="node_id"):
        await a.peer(who("c"), KvAddress("127.0.0.1", port), soon())


async def test_a_peer_that_does_not_hold_its_key_is_refused_and_told(net: Net) -> None:
    b, on_b = await net("b")
    port = await b.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    liar = Session(local("a").as_peer(), key_of("m"), True, None, os.urandom(32))
    writer.write(liar.start())
    parser = FrameParser()
    answer = await reader.read(1000)
    parser.get_buffers()[0][: len(answer)] = answer
    parser.buffer_updated(len(answer))
    hello = parser.next_frame()
    assert hello is not None
    writer.write(liar.receive(hello, parser.hello_body))
    assert (await refusal(reader)).reason == "refused public_key"
    writer.close()
    assert not b.links()
    assert not on_b.peers


async def test_a_new_incarnation_drops_the_old_one(net: Net) -> None:
    b, on_b = await net("b")
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    old, on_old = await net("a", incarnation="1")
    await old.peer(who("b"), address, soon())
    first = await b.peer(who("a"), None, soon())
    new, _ = await net("a", incarnation="2")
    await new.peer(who("b"), address, soon())
    second = await b.peer(who("a", "2"), None, soon())
    await until(lambda: on_b.lost and on_old.lost)
    assert not first.alive
    assert second.alive
    assert "incarnation 2" in on_b.lost[0][1]
    with pytest.raises(PeerUnreachable):
        await b.peer(who("a"), None, soon(0.1))


async def test_another_key_cannot_displace_a_connected_node(net: Net) -> None:
    b, on_b = await net("b")
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    a, _ = await net("a")
    await a.peer(who("b"), address, soon())
    impostor, _ = await net("a", key="m")
    with pytest.raises(PeerRefused, match="another key"):
        await impostor.peer(who("b"), address, soon())
    assert (await a.peer(who("b"), None, soon())).alive
    assert not on_b.lost


async def test_a_node_whose_key_the_gateway_does_not_know_is_refused_whoever_dials(net: Net) -> None:
    b, _ = await net("b")
    impostor, _ = await net("a", key="m")
    address = KvAddress("127.0.0.1", await impostor.listen("127.0.0.1", 0))
    with pytest.raises(PeerRefused) as caught:
        await b.peer(who("a"), address, soon())
    assert caught.value.field == "public_key"
    waiting = asyncio.create_task(b.peer(who("a"), None, soon()))
    await asyncio.sleep(0)
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    with pytest.raises(PeerRefused, match="public_key"):
        await impostor.peer(who("b"), address, soon())
    a, _ = await net("a")
    await a.peer(who("b"), address, soon())
    assert (await waiting).identity.public_key == who("a").public_key


async def test_an_impostor_that_came_first_makes_way_for_the_node_that_the_gateway_knows(net: Net) -> None:
    b, on_b = await net("b")
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    impostor, _ = await net("a", key="m")
    await impostor.peer(who("b"), address, soon())
    waiting = asyncio.create_task(b.peer(who("a"), None, soon()))
    await until(lambda: on_b.lost)
    assert "another key" in on_b.lost[0][1]
    a, _ = await net("a")
    await a.peer(who("b"), address, soon())
    assert (await waiting).identity.public_key == who("a").public_key


async def test_the_number_of_peers_is_bounded(net: Net) -> None:
    b, _ = await net("b", limits=replace(QUICK, max_peers=2))
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    for name in ("p", "q"):
        await (await net(name))[0].peer(who("b"), address, soon())
    with pytest.raises(PeerRefused, match="peers"):
        await (await net("r"))[0].peer(who("b"), address, soon())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_listening_off_the_loopback_needs_tls(net: Net, host: str) -> None:
    a, _ = await net("a")
    with pytest.raises(InsecureBind, match="certificate"):
        await a.listen(host, 0)


async def test_dialling_off_the_loopback_needs_tls(net: Net) -> None:
    a, _ = await net("a")
    with pytest.raises(PeerRefused, match="tls"):
        await a.peer(who("b"), KvAddress("192.0.2.1", 1), soon())


# ---- strangers and garbage


async def test_a_silent_stranger_is_dropped_at_the_handshake_deadline(net: Net) -> None:
    b, _ = await net("b")
    port = await b.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert 0.3 < time.monotonic() - began < 1.5
    writer.close()


async def test_a_crowd_of_strangers_is_bounded_and_does_not_keep_a_node_out(net: Net) -> None:
    b, _ = await net("b", limits=replace(QUICK, max_greetings=8, handshake_s=30.0))
    port = await b.listen("127.0.0.1", 0)
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
    await until(lambda: sum(reader.at_eof() for reader, _ in strangers) >= 22)
    assert len(b._greetings) <= 8
    a, _ = await net("a")
    assert (await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())).alive
    for _, writer in strangers:
        writer.close()


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    header.pack(1 << 30, 1, Kind.HELLO, 0),
    header.pack(50, 9, Kind.HELLO, 0),
    header.pack(3, 1, Kind.HELLO, 0) + b"\xc1\xc1\xc1",
    encode_frame(Grant(T)),
    encode_frame(data(0, 5)) + b"12345",
    b"\0" * 64,
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_instead_of_hello_is_refused_and_harms_nobody(net: Net, garbage: bytes) -> None:
    (a, _), (b, on_b) = await net("a"), await net("b")
    port = await b.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(garbage)
    assert (await refusal(reader)).reason.startswith("refused ")
    writer.close()
    assert (await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())).alive
    assert not on_b.peers


@pytest.mark.parametrize("garbage", GARBAGE[:4])
async def test_garbage_instead_of_a_proof_is_refused(net: Net, garbage: bytes) -> None:
    b, _ = await net("b")
    port = await b.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(Session(local("a").as_peer(), key_of("a"), True, None, os.urandom(32)).start() + garbage)
    assert (await refusal(reader)).reason.startswith("refused ")
    writer.close()
    assert not b.links()


async def test_a_server_that_talks_garbage_does_not_confuse_the_node_that_dials(net: Net) -> None:
    a, on_a = await net("a")

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    with pytest.raises(PeerUnreachable, match="frame"):
        await a.peer(who("b"), KvAddress("127.0.0.1", server.sockets[0].getsockname()[1]), soon(0.5))
    server.close()
    assert not a.links()
    assert not on_a.peers


@pytest.mark.parametrize("garbage", [b"\xff" * 32, encode_frame(data(0, 100)) + bytes(100) + b"\0" * 8])
async def test_garbage_from_a_peer_ends_it_with_the_field_and_frees_its_target(net: Net, garbage: bytes) -> None:
    at_a, on_a, at_b, on_b = await pair(net)
    at_a.queue.push_control(garbage)
    at_a.send(Grant(T))
    await until(lambda: on_a.lost and on_b.lost)
    assert "no frame" in on_b.lost[0][1]
    assert "no frame" in on_a.lost[0][1]
    assert not at_b.alive
    assert not on_b.frames


# ---- payloads


@pytest.mark.parametrize("size", [0, 1, 16_384, 16_385, 1_000_003, 9 * MIB])
async def test_a_payload_of_many_parts_arrives_whole(net: Net, size: int) -> None:
    at_a, _, _, on_b = await pair(net)
    payload = random.Random(size).randbytes(size)
    parts = [payload[n : n + 50_001] for n in range(0, size, 50_001)]
    await send_data(at_a, data(0, size), parts)
    await until(lambda: on_b.arrived)
    assert on_b.memory[T, 0] == payload


async def test_memory_may_change_as_soon_as_send_data_returns(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    room = bytearray(4 * MIB)
    for seq in range(8):
        room[:] = bytes([seq]) * len(room)
        await send_data(at_a, data(seq, len(room)), [room])
    room[:] = b"\xff" * len(room)
    await until(lambda: len(on_b.arrived) == 8)
    assert all(on_b.memory[T, seq] == bytes([seq]) * len(room) for seq in range(8))


async def test_a_payload_that_is_not_what_its_header_says_is_a_mistake_of_the_caller(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    with pytest.raises(ValueError, match="payload of 4 bytes"):
        await send_data(at_a, data(0, 5), [b"1234"])
    await send_data(at_a, data(1, 5), [b"12345"])
    await until(lambda: on_b.arrived == [(T, 1)])


async def test_a_cancelled_send_lets_go_of_its_memory_and_does_not_break_the_stream(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    at_b.pause()
    room = bytearray(b"a" * (64 * MIB))
    begun = asyncio.create_task(send_data(at_a, data(0, len(room)), [room]))
    queued = asyncio.create_task(send_data(at_a, data(1, 3), [b"abc"]))
    await asyncio.sleep(0.1)
    assert not begun.done()
    for task in (begun, queued):
        task.cancel()
    await asyncio.gather(begun, queued, return_exceptions=True)
    room[:] = b"b" * len(room)
    at_b.resume()
    await send_data(at_a, data(2, 3), [b"xyz"])
    await until(lambda: (T, 2) in on_b.arrived)
    assert on_b.arrived == [(T, 0), (T, 2)]
    assert on_b.memory[T, 0] == b"a" * len(room)


async def test_memory_taken_back_is_not_written_any_more(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    sock = at_a.connections[0]._channel.sock
    room = bytearray(MIB)
    on_b.target = lambda peer, frame: [memoryview(room)]
    whole = encode_frame(data(0, MIB)) + b"x" * MIB
    at_a._loop.remove_reader(sock.fileno())
    sock.setblocking(True)
    sock.sendall(whole[: MIB // 2])
    await until(lambda: room[MIB // 4])
    await asyncio.sleep(0.05)
    at_b.drop_payload(b"another transfer")
    at_b.drop_payload(T)
    room[:] = bytes(MIB)
    sock.sendall(whole[MIB // 2 :] + encode_frame(Grant(T)))
    await until(lambda: on_b.frames)
    assert room == bytes(MIB)
    assert not on_b.arrived


async def test_a_header_that_breaks_the_plan_aborts_its_transfer_on_both_sides_and_no_other(net: Net) -> None:
    at_a, on_a, _, on_b = await pair(net)
    other = b"o" * 16

    def target(peer: Peer, frame: Data) -> list[memoryview] | None:
        if frame.transfer == other:
            return [memoryview(bytearray(frame.wire_bytes))]
        raise TransferViolation("seq", "9, the plan says 0")

    on_b.target = target
    await send_data(at_a, data(9, 300_000), [bytes(300_000)])
    await send_data(at_a, data(0, 300_000, other), [bytes(300_000)])
    await until(lambda: on_a.frames and on_b.arrived)
    assert on_a.frames == on_b.frames == [Abort(T, "violation", "seq: 9, the plan says 0")]
    assert on_b.arrived == [(other, 0)]


async def test_a_violation_found_later_aborts_the_transfer_too(net: Net) -> None:
    at_a, on_a, _, on_b = await pair(net)

    def refuse(peer: Peer, frame: object) -> None:
        if not isinstance(frame, Abort):
            raise TransferViolation("digest", "damaged")

    on_b.on = refuse
    await send_data(at_a, data(0, 3), [b"abc"])
    at_a.send(Ack(T, 5))
    await until(lambda: len(on_a.frames) == 2)
    assert on_a.frames == [Abort(T, "violation", "digest: damaged")] * 2


async def test_an_exception_in_a_handler_ends_its_peer_with_the_cause(net: Net) -> None:
    at_a, on_a, _, on_b = await pair(net)

    def fail(peer: Peer, frame: object) -> None:
        raise RuntimeError("out of luck")

    on_b.on = fail
    at_a.send(Grant(T))
    await until(lambda: on_a.lost and on_b.lost)
    assert on_b.lost == [("a", "handler failed: RuntimeError")]
    assert "handler failed" in on_a.lost[0][1]


async def test_a_target_of_the_wrong_size_ends_the_peer_and_writes_nothing(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    room = bytearray(10)
    on_b.target = lambda peer, frame: [memoryview(room)]
    await send_data(at_a, data(0, 11), [b"x" * 11])
    await until(lambda: on_b.lost)
    assert room == bytes(10)


# ---- back-pressure and fairness


async def test_a_paused_peer_is_read_no_further_and_not_taken_for_lost(net: Net) -> None:
    at_a, on_a, at_b, on_b = await pair(net)
    before = at_a.connections, at_b.connections
    at_b.pause()
    at_b.pause()
    sending = asyncio.create_task(send_data(at_a, data(0, 64 * MIB), [bytes(64 * MIB)]))
    await asyncio.sleep(3 * QUICK.lost_after_s)
    assert not sending.done()
    assert not on_b.arrived
    assert not on_a.lost
    assert not on_b.lost
    assert (at_a.connections, at_b.connections) == before
    at_b.resume()
    at_b.resume()
    await sending
    await until(lambda: on_b.arrived)


async def test_a_peer_that_ends_while_it_is_paused_is_noticed(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    at_b.pause()
    at_a.close("gone")
    await until(lambda: on_b.lost, 1.0)
    assert not at_b.alive


async def test_pausing_between_two_frames_of_one_read_holds_back_the_second(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    on_b.on = lambda peer, frame: peer.pause()
    for seq in range(3):
        at_a.send(Ack(T, seq))
    for seq in range(3):
        await until(lambda seq=seq: len(on_b.frames) == seq + 1)
        await asyncio.sleep(0.05)
        assert len(on_b.frames) == seq + 1
        at_b.resume()


async def test_a_stalled_receiver_slows_nobody_else(net: Net) -> None:
    a, _ = await net("a")
    (b, _), (c, on_c) = await net("b"), await net("c")
    addresses = [KvAddress("127.0.0.1", await end.listen("127.0.0.1", 0)) for end in (b, c)]
    to_b = await a.peer(who("b"), addresses[0], soon())
    to_c = await a.peer(who("c"), addresses[1], soon())
    (await b.peer(who("a"), None, soon())).pause()
    stalled = asyncio.create_task(send_data(to_b, data(0, 64 * MIB), [bytes(64 * MIB)]))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    for seq in range(20):
        await send_data(to_c, data(seq, MIB), [bytes(MIB)])
    await until(lambda: len(on_c.arrived) == 20)
    assert time.monotonic() - began < 2
    assert not stalled.done()
    await a.close()
    with pytest.raises(PeerLost):
        await stalled


async def test_a_peer_that_never_reads_its_control_frames_is_closed(net: Net) -> None:
    at_a, on_a, at_b, _ = await pair(net, replace(QUICK, control_backlog=MIB))
    at_b.pause()
    big = Abort(T, "x" * 100_000)
    for _ in range(2000):
        at_a.send(big)
        if not at_a.alive:
            break
    assert not at_a.alive
    await until(lambda: on_a.lost)
    assert "reads too slowly" in on_a.lost[0][1]


async def test_a_small_transfer_overtakes_the_rest_of_a_large_one(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    small = b"s" * 16
    at_b.pause()
    block = bytes(4 * MIB)
    sends = [
        asyncio.create_task(send_data(at_a, data(seq, len(block)), [block], (16 - seq) * len(block)))
        for seq in range(16)
    ]
    await asyncio.sleep(0.05)
    sends.append(asyncio.create_task(send_data(at_a, data(0, 1000, small), [bytes(1000)], 1000)))
    await asyncio.sleep(0)
    at_a.send(Grant(T))
    on_b.on = lambda peer, frame: order.append(frame)
    order: list[object] = []
    at_b.resume()
    await asyncio.gather(*sends)
    await until(lambda: len(order) == 18)
    assert order.index(data(0, 1000, small)) < 10
    assert order.index(Grant(T)) < 10
    assert [frame.seq for frame in order if isinstance(frame, Data) and frame.transfer == T] == list(range(16))


async def test_many_transfers_share_one_socket(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(2000):
        await send_data(at_a, data(0, 100, n.to_bytes(16, "big")), [bytes(100)])
    await until(lambda: len(on_b.arrived) == 2000)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not at_a.queue
    assert len(at_a.queue._order) == 0


# ---- loss


@pytest.mark.parametrize("swallows", [True, False])
async def test_a_silently_cut_connection_is_noticed_by_both_within_five_seconds(net: Net, swallows: bool) -> None:
    (a, on_a), (b, on_b) = await net("a", limits=TransportLimits()), await net("b", limits=TransportLimits())
    proxy = Proxy(await b.listen("127.0.0.1", 0), swallows)
    at_a = await a.peer(who("b"), await proxy.start(), soon())
    await asyncio.sleep(1.2)
    assert at_a.way_s > 0
    proxy.silent = True
    sending = asyncio.create_task(send_data(at_a, data(0, 64 * MIB), [bytes(64 * MIB)]))
    took = await until(lambda: on_a.lost and on_b.lost, 5.0)
    assert took > 2.5
    assert on_a.lost == [("b", "silent for 4.0 s")]
    assert on_b.lost == [("a", "silent for 4.0 s")]
    if swallows:
        await sending
    else:
        with pytest.raises(PeerLost, match="silent"):
            await sending
    await proxy.stop()


NODE = """
import asyncio, sys
from tests.kvcache.kvnet import Recorder, local
from kvcache.transport import KvEndpoint
async def main():
    endpoint = KvEndpoint(local("b"), Recorder())
    print(await endpoint.listen("127.0.0.1", 0), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "within"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 5.0)])
async def test_a_killed_or_stopped_peer_is_noticed(net: Net, how: signal.Signals, within: float) -> None:
    a, on_a = await net("a", limits=TransportLimits())
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", NODE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        port = int(await child.stdout.readline())
        peer = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
        child.send_signal(how)
        await until(lambda: on_a.lost, within)
        assert not peer.alive
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def test_loss_is_told_once_and_ends_every_waiting_send(net: Net) -> None:
    at_a, on_a, at_b, on_b = await pair(net)
    at_b.pause()
    sends = [asyncio.create_task(send_data(at_a, data(n, 32 * MIB), [bytes(32 * MIB)])) for n in range(3)]
    await asyncio.sleep(0.05)
    at_a.close("enough")
    at_a.close("again")
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert all(isinstance(outcome, PeerLost) and "enough" in str(outcome) for outcome in outcomes)
    at_a.send(Grant(T))
    with pytest.raises(PeerLost):
        await send_data(at_a, data(0, 1), [b"x"])
    at_b.resume()
    await until(lambda: on_b.lost)
    await asyncio.sleep(0.6)
    assert on_a.lost == [("b", "enough")]
    assert len(on_b.lost) == 1


async def test_a_closed_peer_learns_why(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    at_a.close("this node drains")
    await until(lambda: on_b.lost)
    assert on_b.lost == [("a", "closed by the peer: closing: this node drains")]


async def test_after_a_loss_the_next_caller_gets_a_new_connection(net: Net) -> None:
    (a, on_a), (b, _) = await net("a"), await net("b")
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    first = await a.peer(who("b"), address, soon())
    first.close("test")
    second = await a.peer(who("b"), address, soon())
    assert second is not first
    await asyncio.sleep(0.2)
    assert second.alive
    assert len(on_a.lost) == 1


async def test_a_connection_whose_loss_one_side_has_not_noticed_hinders_no_new_one(net: Net) -> None:
    (a, _), (b, on_b) = await net("a"), await net("b", limits=TransportLimits())
    proxy = Proxy(await b.listen("127.0.0.1", 0))
    address = await proxy.start()
    (await a.peer(who("b"), address, soon())).send(Grant(T))
    await until(lambda: on_b.frames)
    proxy.silent = True
    stale = await b.peer(who("a"), None, soon())
    await until(lambda: not a.links())
    proxy.silent = False
    assert stale.alive
    fresh = await a.peer(who("b"), address, soon())
    fresh.send(Grant(T))
    await until(lambda: len(on_b.frames) == 2)
    assert await b.peer(who("a"), None, soon()) is stale
    await until(lambda: len(stale.connections) == 1)
    assert fresh.alive
    await proxy.stop()


async def test_closing_leaves_no_task_no_descriptor_and_may_be_repeated(net: Net) -> None:
    fds = set(os.listdir("/proc/self/fd"))
    tasks = asyncio.all_tasks()
    for _ in range(5):
        a, on_a = KvEndpoint(local("a"), Recorder(), limits=QUICK), Recorder()
        b = KvEndpoint(local("b"), on_a, limits=QUICK)
        port = await b.listen("127.0.0.1", 0)
        peer = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
        waiting = asyncio.create_task(b.peer(who("nobody"), None, soon()))
        dialling = asyncio.create_task(a.peer(who("nobody"), KvAddress("127.0.0.1", 1), soon()))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        peer.send(Grant(T))
        await until(lambda on_a=on_a: on_a.frames)
        for endpoint in (b, a):
            await endpoint.close()
            await endpoint.close()
        outcomes = await asyncio.gather(waiting, dialling, return_exceptions=True)
        assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)
        assert len(on_a.lost) == 1
        with pytest.raises(PeerUnreachable, match="closed"):
            await a.peer(who("b"), None, soon())
        writer.close()
        await asyncio.sleep(0.02)
    assert asyncio.all_tasks() == tasks
    assert set(os.listdir("/proc/self/fd")) == fds


# ---- figures


async def test_a_link_report_counts_bytes_and_measures_round_trip_and_rate(net: Net) -> None:
    (a, _), (b, on_b) = await net("a"), await net("b")
    port = await b.listen("127.0.0.1", 0)
    peer = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    for seq in range(16):
        await send_data(peer, data(seq, MIB), [bytes(MIB)])
    await until(lambda: len(on_b.arrived) == 16)
    await until(lambda: a.links()[0].bytes_sent == b.links()[0].bytes_received)
    (sent,), (received,) = a.links(), b.links()
    assert (sent.peer_node, received.peer_node) == ("b", "a")
    assert 16 * MIB < sent.bytes_sent < 16 * MIB + 10_000
    assert received.goodput_bytes_per_s > 1e7
    assert 0 < sent.rtt_s < 1
    assert 0 < 2 * peer.way_s <= sent.rtt_s
    assert sent.retransmits >= 0


def test_a_rate_counts_the_time_in_which_bytes_came_and_not_the_pauses() -> None:
    meter = RateMeter()
    now = 100.0
    for burst in range(4):
        for _ in range(101):
            meter.add(MIB // 10, now)
            now += 0.001
        now += 30.0 * burst
    assert meter.bytes_per_s == pytest.approx(MIB // 10 / 0.001, rel=0.01)


# ---- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"


def server_side(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


async def test_payloads_pass_over_tls_both_ways_with_pauses(net: Net, certificate: tuple[Path, Path]) -> None:
    a, on_a = await net("a", dial_ssl=ssl.create_default_context(cafile=str(certificate[0])))
    b, on_b = await net("b")
    port = await b.listen("127.0.0.1", 0, server_side(certificate))
    at_a = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    at_b = await b.peer(who("a"), None, soon())
    payload = random.Random(1).randbytes(9 * MIB + 7)
    at_b.pause()
    sends = [
        asyncio.create_task(send_data(peer, data(seq, len(payload)), [payload[:70_001], payload[70_001:]]))
        for peer in (at_a, at_b)
        for seq in range(3)
    ]
    await asyncio.sleep(0.1)
    at_b.resume()
    await asyncio.wait_for(asyncio.gather(*sends), 20)
    await until(lambda: len(on_a.arrived) == len(on_b.arrived) == 3)
    assert all(end.memory[T, seq] == payload for end in (on_a, on_b) for seq in range(3))
    at_a.close("done")
    await until(lambda: on_b.lost)
    assert on_b.lost[0][1].endswith("done")


async def test_a_cancelled_send_over_tls_does_not_break_the_stream(net: Net, certificate: tuple[Path, Path]) -> None:
    a, _ = await net("a", dial_ssl=ssl.create_default_context(cafile=str(certificate[0])))
    b, on_b = await net("b")
    port = await b.listen("127.0.0.1", 0, server_side(certificate))
    at_a = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    at_b = await b.peer(who("a"), None, soon())
    at_b.pause()
    room = bytearray(b"a" * (32 * MIB))
    begun = asyncio.create_task(send_data(at_a, data(0, len(room)), [room]))
    await asyncio.sleep(0.3)
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    room[:] = b"b" * len(room)
    at_b.resume()
    await send_data(at_a, data(1, 3), [b"xyz"])
    await until(lambda: (T, 1) in on_b.arrived)
    assert on_b.memory[T, 0] == b"a" * len(room)


async def test_an_unknown_certificate_is_refused(net: Net, certificate: tuple[Path, Path]) -> None:
    a, _ = await net("a", dial_ssl=ssl.create_default_context())
    b, _ = await net("b")
    port = await b.listen("127.0.0.1", 0, server_side(certificate))
    with pytest.raises(PeerRefused, match="tls"):
        await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())


async def test_plain_and_tls_do_not_meet_and_both_end_in_time(net: Net, certificate: tuple[Path, Path]) -> None:
    plain, _ = await net("a")
    secure, _ = await net("s", dial_ssl=ssl.create_default_context(cafile=str(certificate[0])))
    b, on_b = await net("b")
    tls_port = await b.listen("127.0.0.1", 0, server_side(certificate))
    plain_port = await b.listen("127.0.0.1", 0)
    for end, port in ((plain, tls_port), (secure, plain_port)):
        began = time.monotonic()
        with pytest.raises((PeerUnreachable, PeerRefused)):
            await end.peer(who("b"), KvAddress("127.0.0.1", port), soon(1.0))
        assert time.monotonic() - began < 2
    assert not on_b.peers


async def test_tls_older_than_1_3_is_refused(net: Net, certificate: tuple[Path, Path]) -> None:
    old = ssl.create_default_context(cafile=str(certificate[0]))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    a, _ = await net("a", dial_ssl=old)
    b, _ = await net("b")
    port = await b.listen("127.0.0.1", 0, server_side(certificate))
    with pytest.raises(PeerRefused, match=r"TLSv1\.3"):
        await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
