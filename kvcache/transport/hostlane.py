"""Lanes between two processes of one host: they meet at a socket that has no name in any file system, and hand each
other memory over it.

The name follows from the listening node's public key, which the gateway tells those who may dial it. It belongs to a
network namespace: a process in another one finds nobody, and falls to TCP. So does one of another user: both sides ask
the kernel whose the other end is before a byte is said. Who the peer is, its own proof says, over the
channel.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Coroutine

from kvcache.transport.channel import Channel
from kvcache.transport.hostring import Ring, hand_over
from kvcache.transport.peer import Peer
from kvcache.transport.ring import SHM
from kvcache.wire import Lane

logger = logging.getLogger(__name__)

HANDOVER = b"prfaas-kv-shm 1"
MAX_HANDOVERS = 16
HANDOVER_S = 2.0


class HostCarrier:
    """The lanes of one node, ``public_key``'s. Create it on the event loop."""

    transport = SHM

    def __init__(self, public_key: bytes) -> None:
        self._name = _name(public_key)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handovers: set[asyncio.Task[None]] = set()

    def open(self, arrived: Callable[[Channel], None]) -> None:
        """Let others dial this node; each channel is given to ``arrived``. Raises OSError where that cannot be."""
        if sys.platform != "linux":
            raise OSError("memory without a name, and with a sealed size, is Linux's")
        ring, fd = Ring.create()  # what every lane needs
        os.close(fd)
        ring.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(self._name)
            listener.listen(MAX_HANDOVERS)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener, arrived))

    async def dial(self, peer: Peer) -> Channel:
        """A channel to a peer. Raises OSError: it is not on this host, or not this user's."""
        return await self.dial_key(peer.identity.public_key)

    def on_lane(self, peer: Peer, frame: Lane) -> None:
        """Nothing need be said."""

    async def dial_key(self, public_key: bytes) -> Channel:
        """A channel to the node of this key. Raises OSError as ``dial``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(HANDOVER_S):
                await asyncio.get_running_loop().sock_connect(sock, _name(public_key))
                return await _meet(sock)
        except BaseException:
            sock.close()
            raise

    async def close(self) -> None:
        """Accept nobody any more. Idempotent."""
        tasks = [*self._handovers, *([self._accepting] if self._accepting is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _accept(self, listener: socket.socket, arrived: Callable[[Channel], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("event=kv_lane_accept_failed cause=%s", error)
                await asyncio.sleep(HANDOVER_S)
                continue
            if len(self._handovers) >= MAX_HANDOVERS:
                sock.close()
                continue
            self._spawn(self._receive(sock, arrived))

    async def _receive(self, sock: socket.socket, arrived: Callable[[Channel], None]) -> None:
        try:
            sock.setblocking(False)
            async with asyncio.timeout(HANDOVER_S):
                arrived(await _meet(sock))
        except OSError as error:
            sock.close()
            logger.info("event=kv_lane_refused transport=%s cause=%s", SHM, error or "nothing was handed over")
        except BaseException:
            sock.close()
            raise

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._handovers.add(task)
        task.add_done_callback(self._handovers.discard)


async def _meet(sock: socket.socket) -> Channel:
    """Make a connected socket a channel. Raises OSError."""
    check_owner(sock)
    return await hand_over(sock, HANDOVER)


def check_owner(sock: socket.socket) -> None:
    """Raise PermissionError where the kernel says that the other end is another user's."""
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise PermissionError(f"the process at the other end is of user {uid}, this one of {os.geteuid()}")


def _name(public_key: bytes) -> bytes:
    return b"\0prfaas-kv-" + hashlib.blake2b(public_key, digest_size=16).hexdigest().encode()
