"""A node's outbound stream to one gateway: join, beats, jobs down, progress up; rejoined whenever it breaks.

Nothing is kept for a gateway that is away: whatever breaks the stream ends its jobs on both sides, so a message of an
old session would only confuse the next one. A gateway that does not read closes the stream; it is never waited
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from kvcache import control
from kvcache.control import (
    Beat,
    ControlError,
    Heartbeat,
    Join,
    Order,
    Refused,
    Welcome,
)
from kvcache.control.replicas import Already, Leaving, Siblings
from node.backoff import Backoff
from node.certificate_request import is_of_a_node

log = logging.getLogger(__name__)


class NodeRefused(Exception):
    """The gateway will not have this node; trying again would not help. The text says what must change."""


class CredentialsRefused(NodeRefused):
    """It is over the join token or the certificate that was shown: these are worth nothing any more."""


class StreamLost(Exception):
    """The stream broke; the text says why."""


class AlreadyJoined(Exception):
    """This address leads to a gateway that another stream leads to."""


class ControlHandler(Protocol):
    """What the stream asks of its node. All calls come from the event loop and return at once."""

    def join(self) -> Join:
        """The first message of a session."""

    def heartbeat(self) -> Heartbeat:
        """This node as it is now."""

    def on_welcome(self, welcome: Welcome) -> None:
        """A session has begun."""

    def on_order(self, order: Order | Siblings | Leaving) -> None:
        """The gateway wants something, or tells of others."""

    def on_disconnected(self, cause: str) -> None:
        """The session is over, and with it all that it asked for."""


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Times in seconds. A gateway silent for ``silent_s`` is lost; the backlog is what it has not yet read."""

    connect_s: float = 5.0
    silent_s: float = 4.0
    first_retry_s: float = 0.2
    last_retry_s: float = 5.0
    backlog_bytes: int = 32 << 20


class ControlStream:
    """``run`` keeps one session with the gateway at a time; ``send`` adds to the present one, if there is any."""

    def __init__(
        self,
        url: str,
        handler: ControlHandler,
        *,
        join_token: str | None = None,
        tls: ssl.SSLContext | None = None,
        limits: ControlLimits | None = None,
    ) -> None:
        self._url = url
        self._handler = handler
        self._headers = {"Authorization": f"Bearer {join_token}"} if join_token else {}
        self._tls = tls
        self._limits = limits or ControlLimits()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._overflow = asyncio.Event()
        self._beat_due = asyncio.Event()
        self._beat_s = 1.0
        self._joined = False

    @property
    def joined(self) -> bool:
        """Whether a session with the gateway is open."""
        return self._joined

    @property
    def backlog_bytes(self) -> int:
        """What was sent in this session and is not yet written."""
        return self._backlog_bytes

    def send(self, message: control.FromNode) -> None:
        """Queue a message of this session; without a session it is dropped, as its job is over anyway."""
        if not self._joined:
            return
        data = control.encode(message)
        if self._backlog_bytes + len(data) > self._limits.backlog_bytes:
            self._overflow.set()
            return
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        self._written.clear()
        self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Return when all that was sent is written, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._written.wait()

    def beat_now(self) -> None:
        """Send a heartbeat without waiting for the next second: something in it changed."""
        self._beat_due.set()

    async def run(self) -> None:
        """Join and rejoin until cancelled. Raises NodeRefused."""
        backoff = Backoff(self._limits.first_retry_s, self._limits.last_retry_s)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http:
            while True:
                try:
                    await self._session(http, backoff)
                except StreamLost as lost:
                    delay = backoff.next_delay()
                    log.warning("gateway lost url=%s cause=%r retry_in=%.1fs", self._url, str(lost), delay)
                    await asyncio.sleep(delay)
                except AlreadyJoined:
                    await asyncio.sleep(self._limits.last_retry_s)  # by then it may lead elsewhere

    async def _session(self, http: aiohttp.ClientSession, backoff: Backoff) -> None:
        """One session, from dialling to its end, which is always an exception."""
        stream = await self._dial(http)
        try:
            welcome = await self._greet(stream)
            backoff.reset()
            self._beat_s = welcome.beat_s
            self._joined = True
            cause = "closed"
            try:
                self._handler.on_welcome(welcome)
                await _first_failure(self._receive(stream), self._transmit(stream), self._watch_backlog(), self._beat())
            except StreamLost as lost:
                cause = str(lost)
                raise
            finally:
                self._joined = False
                self._backlog.clear()
                self._backlog_bytes = 0
                self._overflow.clear()
                self._written.set()
                self._handler.on_disconnected(cause)
        finally:
            await _close(stream)

    async def _dial(self, http: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            async with asyncio.timeout(self._limits.connect_s):
                stream = await http.ws_connect(
                    self._url, ssl=self._tls or True, max_msg_size=control.MAX_MESSAGE_BYTES, autoping=True
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise CredentialsRefused(
                    f"join token: the gateway answered {error.status}; give the token that is in force for the cluster "
                    "(--join-token-file) and start again"
                ) from error
            raise StreamLost(f"handshake answered {error.status}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StreamLost(f"connect: {error or type(error).__name__}") from error
        if is_of_a_node(stream.get_extra_info("peercert")):
            await _close(stream)
            raise StreamLost("a node answers in the gateway's place")
        return stream

    async def _greet(self, stream: aiohttp.ClientWebSocketResponse) -> Welcome:
        await self._write(stream, control.encode(self._handler.join()))
        answer = await self._read(stream)
        if isinstance(answer, Already):
            raise AlreadyJoined(answer.gateway)
        if not isinstance(answer, Welcome):
            raise StreamLost(f"protocol: {type(answer).__name__} came before Welcome")
        return answer

    async def _receive(self, stream: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            message = await self._read(stream)
            if isinstance(message, Welcome | Already):
                raise StreamLost(f"protocol: {type(message).__name__} within a session")
            if not isinstance(message, Beat):
                self._handler.on_order(message)

    async def _read(
        self, stream: aiohttp.ClientWebSocketResponse
    ) -> Welcome | Already | Beat | Siblings | Leaving | Order:
        """The next message. Raises NodeRefused, and StreamLost for a silent, closed or broken stream."""
        try:
            message = await stream.receive(timeout=self._limits.silent_s)
        except TimeoutError:
            raise StreamLost(f"nothing heard for {self._limits.silent_s:.1f} s") from None
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise StreamLost(f"closed by the gateway ({message.type.name.lower()}, code {stream.close_code})")
        try:
            decoded = control.decode_to_node(message.data)
        except ControlError as error:
            raise StreamLost(f"protocol: {error}") from error
        if isinstance(decoded, Refused):
            kind = CredentialsRefused if decoded.field == "certificate" else NodeRefused
            raise kind(f"{decoded.field}: {decoded.reason}")
        return decoded

    async def _transmit(self, stream: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._backlog:
                data = self._backlog.popleft()
                self._backlog_bytes -= len(data)
                await self._write(stream, data)
            self._written.set()

    async def _watch_backlog(self) -> None:
        await self._overflow.wait()
        raise StreamLost(f"the gateway left more than {self._limits.backlog_bytes} bytes unread")

    async def _beat(self) -> None:
        while True:
            self._beat_due.clear()
            self.send(self._handler.heartbeat())
            try:
                async with asyncio.timeout(self._beat_s):
                    await self._beat_due.wait()
            except TimeoutError:
                continue

    async def _write(self, stream: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.silent_s):
                await stream.send_bytes(data)
        except TimeoutError:
            raise StreamLost(f"the gateway read nothing for {self._limits.silent_s:.1f} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise StreamLost(f"write: {error or type(error).__name__}") from error


async def _first_failure(*parts: Awaitable[None]) -> None:
    """Run all parts until one fails; end the others and raise what it raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close(stream: aiohttp.ClientWebSocketResponse) -> None:
    try:
        async with asyncio.timeout(1.0):
            await stream.close()
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        log.debug("the control stream did not close in order")
