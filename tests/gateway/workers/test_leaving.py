"""Leaving a shared port loses nobody who had connected."""

import asyncio
import socket

import uvloop

from gateway.workers.leaving import leave_shared
from gateway.workers.worker import listen


def test_whoever_waits_in_the_queue_of_a_listener_that_is_closed_is_served() -> None:
    async def run() -> list[bytes]:
        loop = asyncio.get_running_loop()
        listener = listen("127.0.0.1", 0, shared=True)
        address = listener.getsockname()
        served = []

        async def take(client: socket.socket) -> None:
            served.append(client)
            client.setblocking(True)
            client.sendall(b"hello")

        server = await loop.create_server(asyncio.Protocol, sock=listener)
        leaving = asyncio.create_task(leave_shared(server, take))
        await asyncio.sleep(0)  # it accepts no more; connections are still made
        clients = [socket.create_connection(address, 5.0) for _ in range(20)]
        await leaving
        assert len(served) == 20
        answers = [client.recv(8) for client in clients]
        refused = socket.socket()
        assert refused.connect_ex(address) != 0
        for one in (*clients, *served, refused):
            one.close()
        return answers

    assert uvloop.run(run()) == [b"hello"] * 20
