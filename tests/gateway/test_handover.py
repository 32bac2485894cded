from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.config import ConfigError
from gateway.handover import Offer, Successor


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def offered(path: Path, listener: socket.socket) -> tuple[Offer, asyncio.Event]:
    taken = asyncio.Event()
    offer = Offer(path, listener, taken.set)
    offer.start()
    return offer, taken


async def take(path: Path) -> Successor | None:
    return await asyncio.to_thread(Successor.take, path)


async def test_a_connection_made_before_the_takeover_waits_for_the_successor(tmp_path: Path) -> None:
    path, listener = tmp_path / "port", listening()
    offer, taken = await offered(path, listener)
    client = socket.create_connection(listener.getsockname())
    successor = await take(path)
    assert successor is not None
    listener.close()
    accepted, _ = successor.listener.accept()
    accepted.sendall(b"from the successor")
    assert client.recv(100) == b"from the successor"
    assert not taken.is_set(), "the predecessor stays until the successor serves"
    successor.ready()
    async with asyncio.timeout(5):
        await taken.wait()
    await offer.stop()
    for each in (client, accepted, successor.listener):
        each.close()


async def test_a_successor_that_does_not_come_up_leaves_the_predecessor_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "port"
    with listening() as listener:
        offer, taken = await offered(path, listener)
        for _ in range(2):  # and another one can try after it
            successor = await take(path)
            assert successor is not None
            successor.close()
            successor.listener.close()
        await asyncio.sleep(0.05)
        assert not taken.is_set()
        await offer.stop()
        assert not path.exists()


async def test_nobody_there_means_starting_as_the_first(tmp_path: Path) -> None:
    assert await take(tmp_path / "nothing") is None
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead"))
    dead.close()
    assert await take(tmp_path / "dead") is None, "left behind by a process that was killed"


async def test_the_path_stays_with_the_successor_when_the_predecessor_ends(tmp_path: Path) -> None:
    path = tmp_path / "port"
    with listening() as listener:
        first, _ = await offered(path, listener)
        second, _ = await offered(path, listener)
        await first.stop()
        assert path.exists()
        assert path.stat().st_mode & 0o077 == 0, "whoever can connect gets the port"
        await second.stop()
        assert not path.exists()


async def test_a_path_that_cannot_be_held_is_refused_by_its_option(tmp_path: Path) -> None:
    with listening() as listener, pytest.raises(ConfigError, match=r"--handover .*No such file"):
        Offer(tmp_path / "no" / "port", listener, lambda: None).start()
