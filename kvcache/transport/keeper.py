"""What is kept up behind a peer: the number of its connections, and their share of the node's rate."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable

from kvcache.control import KvAddress
from kvcache.session import Expected, PeerRefused
from kvcache.transport.dialler import Backoff
from kvcache.transport.interface import TransportLimits
from kvcache.transport.peer import Peer
from kvcache.transport.shaping import spread

logger = logging.getLogger(__name__)

Connect = Callable[[Expected, KvAddress, Peer], Awaitable[Peer]]
"""Adds one connection to a peer. Raises PeerRefused, OSError or ValueError."""


class PeerKeeper:
    """Dials whenever a peer has fewer connections than it should, from ``keep`` until the peer is lost."""

    def __init__(
        self,
        limits: TransportLimits,
        connect: Connect,
        spawn: Callable[[Coroutine[None, None, None]], object],
        jitter: random.Random,
    ) -> None:
        self._limits = limits
        self._connect = connect
        self._spawn = spawn
        self._jitter = jitter
        self._kept: dict[Peer, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, wanted: Expected, address: KvAddress, peer: Peer) -> None:
        """Look after this peer; harmless when repeated."""
        if peer not in self._kept:
            self._kept[peer] = asyncio.Event()
            self._spawn(self._keep(wanted, address, peer, self._kept[peer]))

    def look(self, peer: Peer) -> None:
        """It has lost a connection, or is lost."""
        short = self._kept.get(peer)
        if short is not None:
            short.set()

    async def _keep(self, wanted: Expected, address: KvAddress, peer: Peer, short: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        backoff = self._backoff()
        while peer.alive:
            short.clear()
            missing = self._limits.connections - len(peer.connections)
            if missing <= 0:
                backoff = self._backoff()
                await short.wait()
                continue
            await asyncio.sleep(backoff.remaining(loop.time()))
            if not peer.alive:
                break
            count = missing if peer.connections else 1
            made = await asyncio.gather(
                *(self._connect(wanted, address, peer) for _ in range(count)), return_exceptions=True
            )
            failure = next((outcome for outcome in made if isinstance(outcome, Exception)), None)
            if isinstance(failure, PeerRefused) and not peer.connections:
                peer.end(f"not reached again: {failure}")
            elif failure is not None:
                backoff.failed(loop.time(), str(failure) or "handshake took too long")
                logger.info("event=kv_dial_failed peer=%s cause=%s", wanted.node_id, backoff.cause)
        self._kept.pop(peer, None)

    def _backoff(self) -> Backoff:
        return Backoff(self._limits.backoff_first_s, self._limits.backoff_most_s, self._jitter)


class RateKeeper:
    """Spreads the node's rate over the connections of the peers that are busy, again and again."""

    def __init__(self, peers: Callable[[], Iterable[Peer]], every_s: float) -> None:
        self._peers = peers
        self._every_s = every_s
        self._rate = 0.0

    def set_rate(self, bytes_per_s: float) -> None:
        """What all peers together may be sent at from now on; 0 is no limit."""
        self._rate = bytes_per_s
        self.apply()

    def apply(self) -> None:
        """Tell the kernel."""
        busy = sum(len(peer.connections) for peer in self._peers() if peer.busy)
        for peer in self._peers():
            for connection in peer.connections:
                connection.shape(spread(self._rate, busy, len(peer.connections), peer.busy))

    async def run(self) -> None:
        """Follow who is busy, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            for peer in self._peers():
                peer.look()
            self.apply()
