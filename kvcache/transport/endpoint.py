"""All KV connections of one node: it listens, dials, and keeps several connections to each peer that it dialled."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import random
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from kvcache.control import KvAddress, LinkReport
from kvcache.session import NONCE_BYTES, Expected, PeerIdentity, PeerRefused, Session
from kvcache.transport.connection import Connection
from kvcache.transport.dialler import Backoff, connect
from kvcache.transport.greeting import greet
from kvcache.transport.interface import FrameHandler, LocalIdentity, PeerUnreachable, TransportLimits
from kvcache.transport.keeper import PeerKeeper, RateKeeper
from kvcache.transport.lanes import Carrier, Lanes
from kvcache.transport.peer import Peer
from kvcache.transport.shaping import tune
from kvcache.wire import WireError

logger = logging.getLogger(__name__)

_MAX_BACKOFFS = 1024


class InsecureBind(ValueError):
    """Listening off the loopback without TLS."""


class KvEndpoint:
    """Create it on the event loop; ``close()`` ends everything that it began.

    ``dial_ssl`` is the context for outgoing connections; without one only the loopback is dialled. With
    ``trusted_network`` KV goes unencrypted to any address: for benchmarks where nobody else can read or write.
    """

    def __init__(
        self,
        identity: LocalIdentity,
        handler: FrameHandler,
        dial_ssl: ssl.SSLContext | None = None,
        limits: TransportLimits | None = None,
        trusted_network: bool = False,
    ) -> None:
        self._identity = identity
        self._handler = handler
        self._dial_ssl = dial_ssl
        self._trusted_network = trusted_network
        self._limits = limits or TransportLimits()
        self._peers: dict[str, Peer] = {}
        self._waiters: dict[Expected, set[asyncio.Future[Peer]]] = {}
        self._dials: dict[Expected, asyncio.Task[None]] = {}
        self._backoffs: OrderedDict[Expected, Backoff] = OrderedDict()
        self._dial_slots = asyncio.Semaphore(self._limits.max_dials)
        self._jitter = random.SystemRandom()
        self._greetings: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper = PeerKeeper(self._limits, self._connect, self._spawn, self._jitter)
        self._rates = RateKeeper(lambda: self._peers.values(), self._limits.ping_every_s / 4)
        self._pacing: asyncio.Task[None] | None = None
        self._lanes = Lanes(identity, self._limits, self._peers.get, self._spawn)
        self._closed = False

    async def listen(self, host: str, port: int, ssl: ssl.SSLContext | None = None) -> int:
        """Accept peers on ``host``; returns the port, chosen by the system where ``port`` is 0.

        Raises InsecureBind off the loopback without ``ssl``; OSError where the address cannot be bound.
        """
        if self._closed:
            raise RuntimeError("this endpoint is closed")
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, target = found[0]
        if ssl is None and not self._trusted_network and not ipaddress.ip_address(target[0]).is_loopback:
            raise InsecureBind(
                f"KV host {host!r} is not the loopback: give a certificate and a key (TLS), or bind 127.0.0.1"
            )
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(self._limits.max_greetings)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._listeners.append(sock)
        self._spawn(self._accept(sock, ssl))
        bound: int = sock.getsockname()[1]
        return bound

    async def peer(self, wanted: Expected, dial: KvAddress | None, deadline: float) -> Peer:
        """This node's peer, with at least one connection: dialled at ``dial``, or awaited where it is None.

        A peer that was dialled is kept at ``limits.connections`` from then on. A node that is connected under that name
        with another key is not who the gateway means, and is closed. ``deadline`` is in the loop's time. Raises
        PeerRefused where another answers or the two must not talk, PeerUnreachable at the deadline or on ``close()``.
        """
        if self._closed:
            raise PeerUnreachable(f"{wanted.node_id}: this endpoint is closed")
        known = self._peers.get(wanted.node_id)
        if known is not None:
            refusal = wanted.refusal(known.identity)
            if refusal is None and known.connections:
                return known
            if refusal is not None and refusal.field == "public_key":
                known.close(str(refusal))
        waiter: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(wanted, set()).add(waiter)
        if dial is not None and wanted not in self._dials:
            self._dials[wanted] = self._spawn(self._dial(wanted, dial))
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter
        except TimeoutError:
            backoff = self._backoffs.get(wanted)
            cause = "it did not dial in" if dial is None else backoff.cause if backoff is not None else "no answer"
            raise PeerUnreachable(f"{wanted.node_id} was not reached before the deadline: {cause}") from None
        finally:
            self._forget_waiter(wanted, waiter)

    def open_lanes(self, carriers: Sequence[Carrier]) -> tuple[str, ...]:
        """Have data carried by these, too; the transports that this node has from now on, TCP among them."""
        return self._lanes.open(carriers)

    async def lanes(self, peer: Peer, transport: str) -> tuple[Connection, ...]:
        """What else than TCP leads to a peer, made where it is not there yet. Raises LaneFailed."""
        return await self._lanes.to(peer, transport)

    def pace(self, bytes_per_s: float) -> None:
        """Send at this rate at most, all peers together; 0 lifts the limit."""
        self._rates.set_rate(bytes_per_s)

    def probe(self, node_id: str, nbytes: int, on_measured: Callable[[], None]) -> bool:
        """Measure the way to a peer with about ``nbytes``, as ``Peer.probe``; False also where it is unknown."""
        peer = self._peers.get(node_id)
        return peer is not None and peer.probe(nbytes, on_measured)

    def links(self) -> tuple[LinkReport, ...]:
        """Figures of every peer."""
        return tuple(peer.report() for peer in self._peers.values())

    async def close(self) -> None:
        """Stop listening and dialling, then close every peer; harmless when repeated.

        Returns after ``on_lost`` was called for each of them.
        """
        self._closed = True
        self._lanes.refuse()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for wanted in list(self._waiters):
            self._settle(wanted, PeerUnreachable("this endpoint is closed"))
        for peer in list(self._peers.values()):
            peer.close("the node closes its KV endpoint")
        await self._lanes.close()
        await asyncio.sleep(0)

    # ---- connections being made

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("event=kv_accept_failed cause=%s", error)
                await asyncio.sleep(self._limits.ping_every_s)
                continue
            if len(self._greetings) >= self._limits.max_greetings:
                oldest, _ = self._greetings.popitem(last=False)
                oldest.cancel()
            task = self._spawn(self._greet_inbound(sock, context))
            self._greetings[task] = None
            task.add_done_callback(partial(self._greeted, sock))
            await asyncio.sleep(0)

    def _greeted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()
        self._greetings.pop(task, None)

    async def _greet_inbound(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        try:
            tune(sock, self._limits.socket_buffer, self._limits.unsent_in_kernel)
            await self._greet(sock, context)
        except (OSError, PeerRefused, WireError) as error:
            logger.info("event=kv_inbound_refused cause=%s", str(error) or "handshake took too long")

    async def _dial(self, wanted: Expected, address: KvAddress) -> None:
        """Try until nobody waits any more: it worked, was refused, or all deadlines passed. Then keep what was made."""
        loop = asyncio.get_running_loop()
        backoff = self._backoffs.pop(wanted, None)
        if backoff is None:
            backoff = Backoff(self._limits.backoff_first_s, self._limits.backoff_most_s, self._jitter)
        self._backoffs[wanted] = backoff
        if len(self._backoffs) > _MAX_BACKOFFS:
            self._backoffs.popitem(last=False)
        while True:
            await asyncio.sleep(backoff.remaining(loop.time()))
            if wanted not in self._waiters:
                return
            try:
                peer = await self._connect(wanted, address)
            except PeerRefused as refusal:
                backoff.failed(loop.time(), str(refusal))
                self._settle(wanted, refusal)
                return
            except (OSError, ValueError) as error:
                backoff.failed(loop.time(), str(error) or "handshake took too long")
                logger.info("event=kv_dial_failed peer=%s cause=%s", wanted.node_id, backoff.cause)
            else:
                self._backoffs.pop(wanted, None)
                self._keeper.keep(wanted, address, peer)
                return

    async def _connect(self, wanted: Expected, address: KvAddress, only: Peer | None = None) -> Peer:
        """One more connection to this node, or to this peer alone. Raises PeerRefused, OSError or ValueError."""
        async with self._dial_slots:
            sock = await connect(address, self._dial_ssl is not None or self._trusted_network, self._limits)
        try:
            return await self._greet(sock, self._dial_ssl, address.host, wanted, only)
        finally:
            sock.close()

    async def _greet(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        dialled_host: str | None = None,
        expected: Expected | None = None,
        only: Peer | None = None,
    ) -> Peer:
        """Make a connected socket a connection of its peer. Its descriptor moves; the caller closes ``sock`` anyway.

        Raises PeerRefused, WireError or OSError.
        """
        dialled = expected is not None
        session = Session(self._identity.as_peer(), self._identity.key, dialled, expected, os.urandom(NONCE_BYTES))
        async with asyncio.timeout(self._limits.handshake_s):
            channel, parser = await greet(sock, context, dialled_host, session, partial(self._check_admissible, only))
        assert session.peer is not None
        return self._admit(session.peer, Connection(dialled, session.version, channel, parser, self._limits))

    # ---- the registry

    def _check_admissible(self, only: Peer | None, new: PeerIdentity) -> None:
        """Raise PeerRefused where this peer is not who is expected, or has or makes too many connections.

        ``only`` is the peer that the connection was made for, if any: it may be over by now.
        """
        if only is not None and not only.alive:
            raise PeerRefused("peer", f"{new.node_id!r} is no longer wanted")
        for wanted in self._waiters:
            if (wanted.node_id, wanted.incarnation) == (new.node_id, new.incarnation):
                refusal = wanted.refusal(new)
                if refusal is not None:
                    raise refusal
        known = self._peers.get(new.node_id)
        if known is None:
            if len(self._peers) >= self._limits.max_peers:
                raise PeerRefused("peers", f"{len(self._peers)} are connected, no more are taken")
            return
        if known.identity.incarnation != new.incarnation:
            return
        if known.identity.public_key != new.public_key:
            raise PeerRefused("public_key", f"{new.node_id!r} is connected with another key")
        if len(known.connections) >= self._limits.max_connections:
            raise PeerRefused("connections", f"{new.node_id!r} has {len(known.connections)}, no more are taken")

    def _admit(self, identity: PeerIdentity, connection: Connection) -> Peer:
        peer = self._peers.get(identity.node_id)
        if peer is None or peer.identity.incarnation != identity.incarnation:
            if peer is not None:
                peer.close(f"replaced by incarnation {identity.incarnation}")
            peer = Peer(
                identity,
                connection.version,
                self._handler,
                self._limits,
                self._keeper.look,
                self._ended,
                self._lanes.on_lane,
            )
            self._peers[identity.node_id] = peer
        peer.add(connection)
        self._rates.apply()
        if self._pacing is None:
            self._pacing = self._spawn(self._rates.run())
        logger.info(
            "event=kv_connected peer=%s incarnation=%s dialled=%s connections=%d",
            identity.node_id,
            identity.incarnation,
            connection.dialled,
            len(peer.connections),
        )
        self._settle(Expected(identity.node_id, identity.incarnation, identity.public_key), peer)
        return peer

    def _ended(self, peer: Peer) -> None:
        self._keeper.look(peer)
        if self._peers.get(peer.identity.node_id) is peer:
            del self._peers[peer.identity.node_id]

    def _settle(self, wanted: Expected, outcome: Peer | PeerRefused | PeerUnreachable) -> None:
        """Answer all who wait for this peer.

        A handshake under way is not cancelled: were both sides to do so, neither connection would be left.
        """
        self._dials.pop(wanted, None)
        for waiter in self._waiters.pop(wanted, ()):
            if waiter.done():
                continue
            if isinstance(outcome, Peer):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)

    def _forget_waiter(self, wanted: Expected, waiter: asyncio.Future[Peer]) -> None:
        waiters = self._waiters.get(wanted)
        if waiters is None:
            return
        waiters.discard(waiter)
        if not waiters:
            del self._waiters[wanted]
            dial = self._dials.pop(wanted, None)
            if dial is not None:
                dial.cancel()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
