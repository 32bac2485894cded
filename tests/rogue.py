"""A peer that says what the test wants: the real transport with a handler that only listens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache.transport import Connection, Expected, KvEndpoint, LocalIdentity, Peer
from kvcache.transport.interface import TransferFrame
from kvcache.wire import Data, Role
from tests.pair import FINGERPRINT, Side

T = TypeVar("T")


class Rogue:
    """Takes a node's name, and its key where the test gives it one."""

    def __init__(self, node_id: str, incarnation: str, key: Ed25519PrivateKey | None = None) -> None:
        self.heard: list[TransferFrame | Data] = []
        self.lost: str | None = None
        self.peer: Peer | None = None
        self._key = key or Ed25519PrivateKey.generate()
        identity = LocalIdentity(node_id, incarnation, self._key, FINGERPRINT, lambda: Role.DECODE)
        self.endpoint = KvEndpoint(identity, self)

    async def __aenter__(self) -> Rogue:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.endpoint.close()

    async def dial(self, side: Side) -> Peer:
        deadline = asyncio.get_running_loop().time() + 5
        self.peer = await self.endpoint.peer(
            Expected(side.name, side.incarnation, side.public_key), side.address, deadline
        )
        return self.peer

    async def hears(self, kind: type[T], within: float = 5.0) -> T:
        """The first frame of this kind, present or to come."""
        async with asyncio.timeout(within):
            while True:
                for frame in self.heard:
                    if isinstance(frame, kind):
                        return frame
                await asyncio.sleep(0.005)

    def on_frame(self, peer: Peer, frame: TransferFrame) -> None:
        self.peer = peer
        self.heard.append(frame)

    def payload_target(self, peer: Peer, data: Data) -> Sequence[memoryview] | None:
        return [memoryview(bytearray(data.wire_bytes))]

    def on_data(self, peer: Peer, data: Data) -> None:
        self.heard.append(data)

    def on_broken(self, peer: Peer, connection: Connection, unfinished: Data | None) -> None:
        """Others are left, or come soon."""

    def on_lost(self, peer: Peer, cause: str) -> None:
        self.lost = cause
