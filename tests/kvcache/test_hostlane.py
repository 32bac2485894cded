"""Lanes within one host: who may have one, what a peer that breaks the rules gets, and what is left afterwards."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from kvcache.transport import hostlane, hostring
from kvcache.transport.channel import Channel
from kvcache.transport.hostlane import HANDOVER, HostCarrier
from kvcache.transport.hostring import RING_BYTES, Ring, RingChannel
from kvcache.transport.ring import RingError
from tests.kvcache.kvnet import until

KEY = bytes(range(32))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest_asyncio.fixture
async def arrived() -> AsyncIterator[list[Channel]]:
    """Channels that came to a node with KEY."""
    before, found = descriptors(), list[Channel]()
    carrier = HostCarrier(KEY)
    carrier.open(found.append)
    yield found
    await carrier.close()
    for channel in found:
        channel.close()
    await asyncio.sleep(0)
    assert descriptors() == before


async def pair(arrived: list[Channel]) -> tuple[Channel, Channel]:
    mine = await HostCarrier(b"other").dial_key(KEY)
    await until(lambda: arrived)
    return mine, arrived[0]


def readable(channel: Channel) -> bool:
    """Whether a count waits that the loop has not heard yet."""
    return bool(select.select([channel._sock], [], [], 0)[0])  # type: ignore[attr-defined]


def raw() -> socket.socket:
    """A stranger at the door."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(hostlane._name(KEY))
    sock.settimeout(2)
    return sock


async def test_bytes_pass_both_ways_in_any_length(arrived: list[Channel]) -> None:
    mine, theirs = await pair(arrived)
    for sender, receiver in ((mine, theirs), (theirs, mine)):
        source = os.urandom(3 * RING_BYTES + 4099)
        sending = asyncio.create_task(sender.send_all(source))
        got = bytearray()
        while len(got) < len(source):
            room = [memoryview(bytearray(n)) for n in (0, 1, 4096, 70_001)]
            count = await receiver.receive_some(room)
            got += b"".join(room)[:count]
        await sending
        assert bytes(got) == source
    mine.close()


async def test_a_writer_waits_for_its_reader_and_no_longer(arrived: list[Channel]) -> None:
    mine, theirs = await pair(arrived)
    data = memoryview(bytes(RING_BYTES))
    assert mine.send([data]) == RING_BYTES
    assert mine.send([data]) is None
    writable = asyncio.Event()
    mine.watch_writable(writable.set)
    await asyncio.sleep(0.02)
    assert not writable.is_set()
    await theirs.receive_some([memoryview(bytearray(RING_BYTES // 2))])
    await asyncio.wait_for(writable.wait(), 1)
    mine.close()


async def test_what_was_sent_before_the_end_arrives_before_it(arrived: list[Channel]) -> None:
    mine, theirs = await pair(arrived)
    mine.send([memoryview(b"last words")])
    mine.close()
    room = memoryview(bytearray(100))
    assert await theirs.receive_some([room]) == 10
    assert await theirs.receive_some([room]) == 0
    with pytest.raises(ConnectionError):
        theirs.send([room])


async def test_what_one_turn_of_the_loop_brings_is_one_count_and_much_does_not_wait_for_its_end(
    arrived: list[Channel],
) -> None:
    mine, theirs = await pair(arrived)
    for _ in range(5):
        mine.send([memoryview(b"abc")])
    assert not readable(theirs)
    await asyncio.sleep(0)
    assert theirs._sock.recv(100) == hostring._COUNT.pack(1, 15)  # type: ignore[attr-defined]
    for _ in range(4):
        mine.send([memoryview(bytes(RING_BYTES // 8))])
    for _ in range(2):
        assert theirs._sock.recv(100) == hostring._COUNT.pack(1, RING_BYTES // 4)  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert not readable(theirs)
    mine.close()


async def test_what_was_sent_before_one_side_ends_arrives_and_the_other_may_go_on(arrived: list[Channel]) -> None:
    mine, theirs = await pair(arrived)
    mine.send([memoryview(b"last words")])
    mine.finish()
    room = memoryview(bytearray(100))
    assert await theirs.receive_some([room]) == 10
    assert await theirs.receive_some([room]) == 0
    mine.close()


async def test_who_hears_of_the_end_may_close_the_channel(arrived: list[Channel]) -> None:
    mine, theirs = await pair(arrived)
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    theirs.watch_writable(lambda: None)
    theirs.watch_readable(theirs.close)
    mine.close()
    await until(lambda: theirs._sock.fileno() < 0)  # type: ignore[attr-defined]
    assert wrong == []


async def test_a_node_that_is_not_on_this_host_is_not_found() -> None:
    before = descriptors()
    with pytest.raises(ConnectionRefusedError):
        await HostCarrier(b"other").dial_key(b"nobody")
    assert descriptors() == before


async def test_another_user_gets_nothing_and_is_given_nothing(
    arrived: list[Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(PermissionError, match="is of user"):
        await HostCarrier(b"other").dial_key(KEY)
    with raw() as sock:
        assert await asyncio.to_thread(sock.recv, 100) == b""
    assert arrived == []


def memory(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("said", "make"),
    [
        (HANDOVER, list),
        (HANDOVER, lambda: [memory(RING_BYTES, fcntl.F_SEAL_GROW)]),
        (HANDOVER, lambda: [memory(4096, SEALED)]),
        (HANDOVER, lambda: [memory(0, SEALED)]),
        (HANDOVER, lambda: [memory(RING_BYTES, SEALED), memory(RING_BYTES, SEALED)]),
        (HANDOVER, lambda: [memory(RING_BYTES, SEALED | fcntl.F_SEAL_WRITE)]),
        (HANDOVER, lambda: [os.open("/dev/zero", os.O_RDWR)]),
        (HANDOVER, lambda: [os.open("/etc/hostname", os.O_RDONLY)]),
        (HANDOVER[:-1] + b"9", lambda: [memory(RING_BYTES, SEALED)]),
        (HANDOVER + b"...", lambda: [memory(RING_BYTES, SEALED)]),
    ],
    ids=["none", "could shrink", "small", "empty", "two", "read-only", "device", "file", "other version", "more said"],
)
async def test_what_is_no_ring_is_refused_and_closed(
    arrived: list[Channel], said: bytes, make: Callable[[], list[int]]
) -> None:
    fds = make()
    with raw() as sock:
        socket.send_fds(sock, [said], fds)
        for fd in fds:
            os.close(fd)
        assert await asyncio.to_thread(sock.recv, 100) in (HANDOVER, b"")
        assert await asyncio.to_thread(sock.recv, 100) == b""
    assert arrived == []


async def test_who_says_nothing_is_not_waited_for(arrived: list[Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostlane, "HANDOVER_S", 0.05)
    with raw() as sock:
        await asyncio.to_thread(sock.recv, 100)
        assert await asyncio.to_thread(sock.recv, 100) == b""
    assert arrived == []


@pytest.mark.parametrize(
    "said",
    [
        hostring._COUNT.pack(1, RING_BYTES + 1),
        hostring._COUNT.pack(1, 0),
        hostring._COUNT.pack(2, 1),
        hostring._COUNT.pack(3, 1),
        b"odd",
        b"longer than a count",
    ],
    ids=["too much written", "nothing written", "what was not sent given back", "unknown", "short", "long"],
)
async def test_counts_that_cannot_be_end_the_channel(arrived: list[Channel], said: bytes) -> None:
    mine, theirs = await pair(arrived)
    assert isinstance(mine, RingChannel)
    mine._sock.send(said)
    with pytest.raises(RingError):
        await asyncio.wait_for(theirs.receive_some([memoryview(bytearray(10))]), 1)
    with pytest.raises(RingError):
        theirs.send([memoryview(b"x")])
    mine.close()


async def test_counts_that_the_socket_does_not_take_are_said_later(arrived: list[Channel]) -> None:
    mine, theirs = await pair(arrived)
    asyncio.get_running_loop().remove_reader(theirs._sock.fileno())  # type: ignore[attr-defined]
    for _ in range(2000):
        assert mine.send([memoryview(b"abc")]) == 3
        await asyncio.sleep(0)
    assert mine._telling  # type: ignore[attr-defined]
    asyncio.get_running_loop().add_reader(theirs._sock.fileno(), theirs._hear)  # type: ignore[attr-defined]
    got = 0
    while got < 6000:
        got += await asyncio.wait_for(theirs.receive_some([memoryview(bytearray(6000))]), 1)
    assert got == 6000
    mine.close()


def test_a_ring_cannot_be_made_of_what_could_be_cut_off() -> None:
    with pytest.raises(RingError, match="sealed"):
        Ring(memory(RING_BYTES, fcntl.F_SEAL_GROW))
