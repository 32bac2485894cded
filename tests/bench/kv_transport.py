"""How fast bytes pass between two processes, by TCP or memory: ``python -m tests.bench.kv_transport --help``.

The child receives into a pool of its own, scattered over extents as pages would have it; a round ends when the child
has everything and says so. The first round warms both up.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import multiprocessing
import os
import ssl
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache.control import KvAddress
from kvcache.transport import Connection, Expected, KvEndpoint, LocalIdentity, Peer
from kvcache.transport.hostlane import HostCarrier
from kvcache.transport.ring import SHM
from kvcache.wire import Data, Grant, Role

TRANSFER = bytes(16)


def split(view: memoryview, extent: int) -> list[memoryview]:
    """``view`` in parts of ``extent`` bytes."""
    return [view[at : at + extent] for at in range(0, len(view), extent)]


class Receiver:
    """Counts pieces; answers a whole round with a Grant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._pool = memoryview(mmap.mmap(-1, options.total))
        self._pool[:] = bytes(options.total)
        self._pieces = 0
        self.signal = asyncio.Event()
        self.lost = asyncio.Event()

    def on_frame(self, peer: Peer, frame: object) -> None:
        self.signal.set()

    def payload_target(self, peer: Peer, data: Data) -> Sequence[memoryview]:
        at = data.seq * self._options.piece
        return split(self._pool[at : at + data.wire_bytes], self._options.extent)

    def on_data(self, peer: Peer, data: Data) -> None:
        self._pieces += 1
        if self._pieces == self._options.total // self._options.piece:
            self._pieces = 0
            peer.send(Grant(TRANSFER))

    def on_broken(self, peer: Peer, connection: Connection, unfinished: Data | None) -> None:
        """Others are left, or come soon."""

    def on_lost(self, peer: Peer, cause: str) -> None:
        self.lost.set()


def identity(name: str) -> LocalIdentity:
    key = Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32))
    return LocalIdentity(name, "1", key, "bench", lambda: Role.PREFILL)


def carrier(name: str) -> HostCarrier:
    return HostCarrier(identity(name).as_peer().public_key)


async def receive(options: argparse.Namespace, pipe: Pipe) -> None:
    """The child: listen, and end with the first connection."""
    context = None
    if options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls[0], options.tls[1])
    receiver = Receiver(options)
    endpoint = KvEndpoint(identity("b"), receiver)
    endpoint.open_lanes([carrier("b")])
    pipe.send(await endpoint.listen("127.0.0.1", 0, context))
    await receiver.lost.wait()
    await endpoint.close()


async def send(options: argparse.Namespace, port: int) -> None:
    """The parent: send every piece, in ``senders`` transfers at once, round after round."""
    context = ssl.create_default_context(cafile=options.tls[0]) if options.tls else None
    receiver = Receiver(options)
    endpoint = KvEndpoint(identity("a"), receiver, dial_ssl=context)
    deadline = asyncio.get_running_loop().time() + 10
    wanted = Expected("b", "1", identity("b").as_peer().public_key)
    peer = await endpoint.peer(wanted, KvAddress("127.0.0.1", port), deadline)
    endpoint.open_lanes([carrier("a")])
    lanes = await endpoint.lanes(peer, SHM) if options.transport == SHM else None
    source = memoryview(os.urandom(1 << 20) * (options.total >> 20))
    size, pieces = options.piece, options.total // options.piece

    async def transfer(sender: int) -> None:
        name = sender.to_bytes(16, "big")
        for seq in range(sender, pieces, options.senders):
            data = Data(name, seq, 0, 0, 0, 0, 1, "bfloat16", "raw", size, size, bytes(16))
            item = peer.submit(data, split(source[seq * size : (seq + 1) * size], options.extent), only=lanes)
            await asyncio.sleep(0)
            await peer.carried(item)

    for _ in range(options.rounds):
        began, processor = time.perf_counter(), time.process_time()
        await asyncio.gather(*(transfer(sender) for sender in range(options.senders)))
        await receiver.signal.wait()
        receiver.signal.clear()
        rate, processor = options.total / (time.perf_counter() - began) / 1e9, time.process_time() - processor
        print(f"{rate:.2f} GB/s, {processor:.3f} s of the sender's processor", flush=True)
    await endpoint.close()


def child(options: argparse.Namespace, pipe: Pipe) -> None:
    asyncio.run(receive(options, pipe))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("tcp", SHM), default="tcp")
    parser.add_argument("--total", type=int, default=256 << 20, help="bytes of one round")
    parser.add_argument("--piece", type=int, default=128 << 10, help="payload bytes of one Data frame")
    parser.add_argument("--extent", type=int, default=32 << 10, help="bytes that lie together in the pool")
    parser.add_argument("--senders", type=int, default=2, help="transfers at once over the one connection")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"), help="a certificate for 127.0.0.1 and its key")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(options, theirs))
    process.start()
    try:
        asyncio.run(send(options, ours.recv()))
    finally:
        process.join(10)
        process.kill()


if __name__ == "__main__":
    main()
