"""One TLS port in front of several nodes: the name in the handshake decides, and nothing else does."""

import asyncio
import contextlib
import os
import random
import ssl

import pytest

from kvcache.control import KvAddress
from kvcache.transport import Expected, KvEndpoint, LocalIdentity
from kvcache.wire import Data, Role
from node.config import ConfigError
from node.egress.cli import parse_routes
from node.egress.relay import RelayLimits, SniRelay
from node.egress.sni import MAX_HELLO_BYTES, NotTls, server_name
from node.tls import dialling_context, listening_context
from tests.kvcache.kvnet import Recorder, key_of, send_data, soon, until
from tests.node.test_tls import Root


def hello(name: str | None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    return out.read()


def test_the_name_is_read_as_soon_as_the_hello_is_whole_and_not_before():
    data = hello("P1.east.example")
    for end in range(len(data)):
        assert server_name(data[:end]) is None
    assert server_name(data) == server_name(data + b"more") == "p1.east.example"


def test_a_hello_that_is_cut_into_records_is_read_too():
    data = hello("p1.east.example")
    body = data[5:]
    cut = b"".join(data[:3] + len(part).to_bytes(2, "big") + part for part in (body[:3], body[3:90], body[90:]))
    assert server_name(cut) == "p1.east.example"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        hello(None),
        b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x00\x04\x01" + (MAX_HELLO_BYTES + 1).to_bytes(3, "big"),
    ],
)
def test_what_names_no_server_is_refused(data):
    with pytest.raises(NotTls):
        server_name(data)


def test_no_mutated_hello_does_more_than_be_refused():
    dice, good = random.Random(5), hello("p1.east.example")
    for _ in range(5000):
        bad = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        with contextlib.suppress(NotTls):
            name = server_name(bytes(bad[: dice.randint(1, len(bad))]))
            assert name is None or len(name) < len(good)


def test_routes_are_names_and_addresses():
    assert parse_routes(("P1=10.0.0.1:7000", "p2=[::1]:7001")) == {
        "p1": KvAddress("10.0.0.1", 7000),
        "p2": KvAddress("::1", 7001),
    }
    for wrong in (("p1",), ("=h:1",), ("p1=h",), ("p1=h:1", "P1=h:2")):
        with pytest.raises(ConfigError, match="--route"):
            parse_routes(wrong)


@contextlib.asynccontextmanager
async def relaying(routes, **limits):
    relay = SniRelay(routes, RelayLimits(**limits))
    try:
        yield relay, await relay.listen("127.0.0.1", 0)
    finally:
        await relay.close()
        assert relay.connections == 0


async def test_kv_passes_through_with_mutual_tls_between_the_nodes_alone(tmp_path):
    root, before = Root(tmp_path / "root"), set(asyncio.all_tasks())
    fds = len(os.listdir("/proc/self/fd"))

    def node(name, handler, dial_ssl=None):
        return KvEndpoint(LocalIdentity(name, "1", key_of(name), "f", lambda: Role.PREFILL), handler, dial_ssl)

    received = Recorder()
    server = node("server", received)
    client = node("client", Recorder(), dialling_context(root.files("client")))
    port = await server.listen("127.0.0.1", 0, listening_context(root.files("server")))
    async with relaying({"localhost": KvAddress("127.0.0.1", port)}) as (relay, at):
        wanted = Expected("server", "1", key_of("server").public_key().public_bytes_raw())
        peer = await client.peer(wanted, KvAddress("localhost", at), soon())
        await until(lambda: relay.connections == 4)
        payload = random.Random(1).randbytes(5 << 20)
        frame = Data(bytes(16), 0, 0, 0, 0, 0, 1, "float32", "raw", len(payload), len(payload), bytes(16))
        await send_data(peer, frame, [payload])
        await until(lambda: received.arrived)
        assert received.memory[bytes(16), 0] == payload
        await client.close()
        await until(lambda: relay.connections == 0)
    await server.close()
    await asyncio.sleep(0)
    assert set(asyncio.all_tasks()) == before
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize("data", [hello("elsewhere.example"), b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_caller_reaches_nothing_but_the_routes(data):
    reached = asyncio.Event()
    inner = await asyncio.start_server(lambda r, w: reached.set(), "127.0.0.1", 0)
    address = KvAddress("127.0.0.1", inner.sockets[0].getsockname()[1])
    async with relaying({"p1.east.example": address}) as (relay, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 3) == b""
        writer.close()
        await until(lambda: relay.connections == 0)
        assert not reached.is_set()
    inner.close()


async def test_who_says_nothing_and_who_comes_too_many_are_let_go():
    async with relaying({}, max_connections=2, hello_s=0.3) as (relay, port):
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await asyncio.wait_for(streams[2][0].read(), 0.25) == b""
        for reader, _ in streams[:2]:
            assert await asyncio.wait_for(reader.read(), 2) == b""
        await until(lambda: relay.connections == 0)
        for _, writer in streams:
            writer.close()


async def test_a_node_that_is_away_costs_its_own_callers_only():
    async with relaying({"gone": KvAddress("127.0.0.1", 1)}) as (relay, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello("gone"))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 3) == b""
        writer.close()
        await until(lambda: relay.connections == 0)
