"""The control stream's endpoint: a node joins over a WebSocket, then messages flow both ways until it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway import links, stuck
from gateway.asgi import Receive, Scope, Send
from gateway.config import GatewayConfig
from gateway.executors import OwnNodes
from gateway.interconnect import Interconnects
from gateway.joining.door import Door
from gateway.joining.refusals import Cause, Refusals, TurnedAway
from gateway.joining.stream_protocol import STREAM
from gateway.kv_audits import KvAudits
from gateway.kv_index import KvIndex
from gateway.metrics import Metrics
from gateway.registry import Registry
from gateway.sessions import NodeLost, NodeSession
from kvcache import control
from kvcache.control import (
    AnswerEnded,
    Beat,
    Cancelled,
    ControlError,
    Delta,
    Failed,
    Finished,
    FromNode,
    Heartbeat,
    Join,
    KvEvents,
    PrefillDone,
    PrefillStarted,
    RateLease,
    Refused,
    RoleChanged,
    TransferDone,
    Welcome,
)
from kvcache.control.audits import KvAudited
from kvcache.control.renewal import RenewCertificate
from kvcache.control.replicas import Already, Siblings

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
UNREAD_S = 10.0
"""How long a message may wait for a node to read those before it: the largest one, over a slow link."""
_SECOND_LOOK_S = 0.05
_POLICY_VIOLATION = 1008
_FIELDS = {Cause.OTHER_CLUSTER: "cluster", Cause.CERTIFICATE_REVOKED: "certificate"}


class Stream(Protocol):
    """The protocol below a control stream."""

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """From now on ``hear`` binary messages as they are read, those that wait first. It must not raise."""

    def say(self, data: bytes) -> bool:
        """Write a binary message at once; False where it has to wait, or cannot be written any more."""


class ControlStreams:
    """Serves ``/v1/nodes/stream``."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: Registry,
        door: Door,
        refusals: Refusals,
        audits: KvAudits,
        metrics: Metrics,
        own_nodes: OwnNodes,
        ticket_key: Ed25519PrivateKey,
        kv_index: KvIndex,
        interconnects: Interconnects,
        gateway: str,
    ) -> None:
        self._config = config
        self._registry = registry
        self._door = door
        self._refusals = refusals
        self._audits = audits
        self._metrics = metrics
        self._own_nodes = own_nodes
        self._kv_index = kv_index
        self._interconnects = interconnects
        self._gateway = gateway
        self._siblings: tuple[str, ...] = ()
        self._public_key = ticket_key.public_key().public_bytes_raw()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One stream, from its handshake to its end."""
        await receive()
        newcomer = self._door.newcomer(scope)
        if isinstance(newcomer, TurnedAway):
            self._refusals.add(_address(scope), "", newcomer)
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})  # before accept: answered as 403
            return
        await send({"type": "websocket.accept"})
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                first = control.decode_from_node(_payload(await receive()))
        except (TimeoutError, ControlError, NodeLost) as error:
            log.warning("stream without join cause=%s", error or type(error).__name__)
            await _close(send)
            return
        if not isinstance(first, Join):
            reason = f"the first message must be Join, got {type(first).__name__}"
            self._refusals.add(_address(scope), newcomer.cluster or "", TurnedAway(Cause.NOT_JOINED, reason))
            await self._refuse(send, Refused("join", reason))
            return
        if self._is_here(first):
            await self._refuse(send, Already(self._gateway))
            return
        away = self._door.admits(newcomer, first)
        if away is not None:
            field = _FIELDS.get(away.cause, "node_id")
            await self._turn_away(send, first, away, Refused(field, away.reason))
            return
        admitted = self._registry.admit(first, asyncio.get_running_loop().time(), newcomer)
        if isinstance(admitted, Refused):
            away = TurnedAway(Cause.REFUSED, f"{admitted.field}: {admitted.reason}", admitted.field)
            await self._turn_away(send, first, away, admitted)
            return
        await self._run(admitted, scope["state"][STREAM], receive, send)

    async def _turn_away(self, send: Send, join: Join, away: TurnedAway, refused: Refused) -> None:
        self._refusals.add(join.node_id, join.cluster, away)
        await self._refuse(send, refused)

    async def _run(self, session: NodeSession, stream: Stream, receive: Receive, send: Send) -> None:
        session.say = stream.say
        session.send(Welcome(self._public_key, self._config.beat_s, self._config.lease_s, self._gateway))
        if self._siblings and session.join.siblings:
            session.send(Siblings(self._siblings))
        self._kv_index.joined(session)
        self._interconnects.joined(session)
        parts = (_until_closed(receive), self._write(session, send), self._watch(session))
        tasks: set[asyncio.Future[None]] = {asyncio.create_task(part) for part in parts}
        tasks.add(self._hear(session, stream))
        cause = "closed"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                cause = str(error) if isinstance(error, NodeLost) else type(error).__name__
                if error is not None and not isinstance(error, NodeLost):
                    log.error("stream broke node=%s", session.node_id, exc_info=error)
        finally:
            self._registry.lost(session, cause)
            self._kv_index.lost(session, asyncio.get_running_loop().time())
            self._interconnects.lost(session)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if session.lost == "cluster_removed":
                await self._refuse(send, Refused("cluster", f"{session.join.cluster!r} was removed"))
            elif session.lost == "credentials_revoked":
                reason = f"the credentials of cluster {session.join.cluster!r} were revoked; join with its new token"
                await self._refuse(send, Refused("certificate", reason))
            else:
                await _close(send)

    def tell(self, siblings: tuple[str, ...]) -> None:
        """The other gateways are these now: nodes join them, too."""
        self._siblings = siblings
        for session in self._registry.nodes():
            if session.join.siblings:
                with suppress(NodeLost):
                    session.send(Siblings(siblings))

    def _is_here(self, join: Join) -> bool:
        """Whether this node holds a stream to this gateway already, and took this address for another one's."""
        session = self._registry.node(join.node_id)
        known = self._gateway in join.gateways and session is not None and session.incarnation == join.incarnation
        return known and join.siblings

    def _hear(self, session: NodeSession, stream: Stream) -> asyncio.Future[None]:
        """Take what the node says, as soon as it is read, until the future is done: it fails as hearing did."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def hear(data: bytes) -> None:
            if over.done():
                return
            try:
                message = control.decode_from_node(data)
                session.last_heard = loop.time()
                self._route(session, message)
            except ControlError as error:
                over.set_exception(NodeLost(f"protocol: {error}"))
            except Exception as error:
                over.set_exception(error)

        stream.listen(hear)
        return over

    async def _watch(self, session: NodeSession) -> None:
        """Raise NodeLost when the node has said nothing for a lease, or when its certificate has ended."""
        loop = asyncio.get_running_loop()
        while True:
            until = session.credentials.until
            if until is not None and time.time() >= until:
                raise NodeLost("certificate_expired")
            left = session.last_heard + self._config.lease_s - loop.time()
            if left <= 0:
                # If this process was the one that slept, what the node said lies in the socket: let it be read.
                await asyncio.sleep(_SECOND_LOOK_S)
                if session.last_heard + self._config.lease_s <= loop.time():
                    raise NodeLost("silent")
            else:
                await asyncio.sleep(left)

    async def _write(self, session: NodeSession, send: Send) -> None:
        """Send what had to wait, and a beat whenever nothing had to for a while. Raises NodeLost."""
        beat = control.encode(Beat())
        while True:
            data = await session.next_outbound(self._config.beat_s)
            try:
                async with asyncio.timeout(UNREAD_S):
                    await send({"type": "websocket.send", "bytes": beat if data is None else data})
            except TimeoutError:  # it may go on talking: who does not listen can't be given work
                raise NodeLost("does not read") from None
            except OSError as error:  # how ASGI says that the other side is gone
                raise NodeLost("closed") from error

    def _route(self, session: NodeSession, message: FromNode) -> None:
        match message:
            case Delta() | AnswerEnded() | Finished():  # most that is said is the first of these
                self._to_owner(session, message.generation, message)
            case Heartbeat():
                self._heard(session, message)
            case PrefillStarted() | PrefillDone() | TransferDone():
                self._to_owner(session, message.transfer.hex(), message)
            case Failed():
                self._to_owner(session, message.job, message)
            case Cancelled():
                took = session.cancelled(message, session.last_heard)
                if took is not None:
                    self._metrics.cancel.observe(took)
                self._to_owner(session, message.job, message)
            case KvEvents():
                self._kv_index.heard(session, message)
            case RoleChanged():
                self._own_nodes.answered(session, message)
            case KvAudited():
                self._audits.answered(session, message)
            case RenewCertificate():
                session.credentials, answer = self._door.renew(session.credentials, message.request)
                session.send(answer)
            case Join():
                raise NodeLost("protocol: a second Join")

    def _to_owner(self, session: NodeSession, job: str, message: FromNode) -> None:
        """Jobs that ended here meanwhile have no owner; what is still said of them is dropped."""
        owner = session.owner(job)
        if owner is not None:
            owner.on_message(session, message)

    def _heard(self, session: NodeSession, heartbeat: Heartbeat) -> None:
        session.heard(heartbeat, session.last_heard)
        lease = self._registry.lease(session)
        if lease is not None:
            session.send(RateLease(lease))
        links.heard(self._registry, session, session.last_heard)
        stuck.heard(self._registry, session, session.last_heard)
        self._interconnects.heard(session, session.last_heard)

    async def _refuse(self, send: Send, refused: Refused | Already) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await send({"type": "websocket.send", "bytes": control.encode(refused)})
        except Exception as error:  # the stream may be gone in any way; there is nobody left to tell
            log.debug("refusal not delivered cause=%s", error)
        await _close(send)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return "unknown" if client is None else str(client[0])


def _payload(event: MutableMapping[str, Any]) -> bytes:
    """The bytes of a binary message. Raises NodeLost for a closed stream, ControlError for a text message."""
    if event["type"] == "websocket.disconnect":
        raise NodeLost("closed")
    data = event.get("bytes")
    if data is None:
        raise ControlError("text messages are not part of this protocol")
    return bytes(data)


async def _until_closed(receive: Receive) -> None:
    """Raise NodeLost when the stream ends, or says what is no message of this protocol."""
    while True:
        try:
            _payload(await receive())
        except ControlError as error:
            raise NodeLost(f"protocol: {error}") from error


async def _close(send: Send) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await send({"type": "websocket.close", "code": 1000})
    except Exception as error:  # already closed by the other side, in whatever way
        log.debug("close not delivered cause=%s", error)
