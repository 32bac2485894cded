"""Lanes: what carries a peer's data beside TCP, where the two can have it. TCP stays the way of all that is said.

A peer is known by its TCP connections first. A lane is made for it when a transfer wants one, the other side's key is
proved over it once more, and it ends with the peer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

from kvcache.session import NONCE_BYTES, Expected, PeerIdentity, PeerRefused, Session
from kvcache.transport.channel import TCP, Channel
from kvcache.transport.connection import Connection
from kvcache.transport.greeting import introduce
from kvcache.transport.interface import LocalIdentity, TransportLimits
from kvcache.transport.peer import Peer
from kvcache.wire import Lane, WireError

logger = logging.getLogger(__name__)


class LaneFailed(ConnectionError):
    """There is no such lane to this peer; the text says why."""


class Carrier(Protocol):
    """One transport beside TCP."""

    @property
    def transport(self) -> str:
        """Its name in ``scheduler.topology.paths.Transport``."""

    def open(self, arrived: Callable[[Channel], None]) -> None:
        """Let others dial this node; each channel is given to ``arrived``. Raises OSError where that cannot be."""

    async def dial(self, peer: Peer) -> Channel:
        """A channel to a peer. Raises OSError."""

    def on_lane(self, peer: Peer, frame: Lane) -> None:
        """What a peer says of lanes of this transport."""

    async def close(self) -> None:
        """Accept nobody any more. Idempotent."""


class Lanes:
    """The lanes of one endpoint. ``known`` finds a peer by its node's id."""

    def __init__(
        self,
        identity: LocalIdentity,
        limits: TransportLimits,
        known: Callable[[str], Peer | None],
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._known = known
        self._spawn = spawn
        self._open: dict[str, Carrier] = {}
        self._closing = False
        self._greetings = 0
        self._making: dict[tuple[Peer, str], asyncio.Task[None]] = {}

    def open(self, carriers: Sequence[Carrier]) -> tuple[str, ...]:
        """Let others dial; the transports that this node has from now on, TCP among them. They are closed with this."""
        for carrier in carriers:
            try:
                carrier.open(self._arrived)
            except OSError as error:
                logger.warning("event=kv_lanes_unavailable transport=%s cause=%s", carrier.transport, error)
            else:
                self._open[carrier.transport] = carrier
        return (*self._open, TCP)

    async def to(self, peer: Peer, transport: str) -> tuple[Connection, ...]:
        """The lanes to a peer, made where there are none. Raises LaneFailed."""
        lanes = peer.lanes(transport)
        if lanes:
            return lanes
        carrier = self._open.get(transport)
        if carrier is None or self._closing:
            raise LaneFailed(f"this node has no {transport}")
        making = self._making.get((peer, transport))
        if making is None:
            making = self._making[peer, transport] = self._spawn(self._dial(peer, carrier))
            making.add_done_callback(partial(self._made, peer, transport))
        try:
            await asyncio.shield(making)
        except (OSError, ValueError, PeerRefused) as error:
            raise LaneFailed(f"{transport} to {peer.identity.node_id}: {error or 'no answer'}") from error
        except asyncio.CancelledError:
            if making.cancelled():
                raise LaneFailed("this endpoint is closed") from None
            raise
        lanes = peer.lanes(transport)
        if not lanes:
            raise LaneFailed(f"{transport} to {peer.identity.node_id}: lost as soon as it was there")
        return lanes

    def on_lane(self, peer: Peer, frame: Lane) -> None:
        """What a peer says of lanes; nothing comes of a transport that this node does not have."""
        carrier = self._open.get(frame.transport)
        if carrier is not None and not self._closing:
            carrier.on_lane(peer, frame)

    def refuse(self) -> None:
        """Take no lane any more."""
        self._closing = True

    async def close(self) -> None:
        """Accept and dial nobody any more, when no lane is left. Idempotent."""
        for carrier in self._open.values():
            await carrier.close()
        self._open.clear()

    async def _dial(self, peer: Peer, carrier: Carrier) -> None:
        identity = peer.identity
        channel = await carrier.dial(peer)
        await self._join(channel, Expected(identity.node_id, identity.incarnation, identity.public_key))

    def _arrived(self, channel: Channel) -> None:
        if self._closing or self._greetings >= self._limits.max_lane_greetings:
            channel.close()
            return
        self._greetings += 1
        self._spawn(self._greet_inbound(channel)).add_done_callback(partial(self._greeted, channel))

    def _greeted(self, channel: Channel, task: asyncio.Task[None]) -> None:
        self._greetings -= 1
        if task.cancelled():  # perhaps before it began
            channel.close()

    def _made(self, peer: Peer, transport: str, task: asyncio.Task[None]) -> None:
        del self._making[peer, transport]
        if not task.cancelled():
            task.exception()  # those who wait for it hear of it, if any still do

    async def _greet_inbound(self, channel: Channel) -> None:
        try:
            await self._join(channel, None)
        except (OSError, PeerRefused, WireError) as error:
            logger.info("event=kv_lane_refused transport=%s cause=%s", channel.transport, error or "it took too long")

    async def _join(self, channel: Channel, expected: Expected | None) -> None:
        """Prove each other and give the peer its lane. Raises PeerRefused, WireError or OSError."""
        dialled = expected is not None
        session = Session(self._identity.as_peer(), self._identity.key, dialled, expected, os.urandom(NONCE_BYTES))
        async with asyncio.timeout(self._limits.handshake_s):
            parser = await introduce(channel, session, self._check)
        assert session.peer is not None
        try:
            self._check(session.peer)  # once more: it may have been lost meanwhile
        except PeerRefused:
            channel.close()
            raise
        peer = self._known(session.peer.node_id)
        assert peer is not None
        peer.add(Connection(dialled, session.version, channel, parser, self._limits))
        logger.info("event=kv_lane peer=%s transport=%s dialled=%s", peer.identity.node_id, channel.transport, dialled)

    def _check(self, new: PeerIdentity) -> None:
        """A lane belongs to a peer that is there already. Raises PeerRefused."""
        peer = self._known(new.node_id)
        if peer is None or not peer.alive:
            raise PeerRefused("node_id", f"{new.node_id!r} has no connection that this lane could belong to")
        for field in ("incarnation", "public_key"):
            if getattr(peer.identity, field) != getattr(new, field):
                raise PeerRefused(field, f"{new.node_id!r} is connected with another one")
        if peer.lane_count >= self._limits.max_lanes:
            raise PeerRefused("lanes", f"{new.node_id!r} has {peer.lane_count}, no more are taken")
