"""Connections to origins, kept for the next request: bounded in number, in waiting and in age."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.upstream.connection import Connection
from gateway.upstream.errors import Cause, UpstreamError
from gateway.upstream.head import Origin, request_head, split_url
from gateway.upstream.response import Response

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A host that vanished is noticed within 20 s although nothing is sent to it."""
WATCHED_AFTER_S = 1.0
"""Only from then on, so that many requests at once do not wait until that is set on all of their connections."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Of one origin. ``idle_s`` is less than the 5 s after which uvicorn, and so vLLM and SGLang, closes."""

    connections: int = 4096
    waiting: int = 1024
    idle: int = 256
    idle_s: float = 4.0
    connect_s: float = 5.0


DEFAULT_LIMITS = PoolLimits()


class Pool:
    """All connections of one event loop. ``tls`` is for https origins; by default the system's roots are trusted."""

    def __init__(self, limits: PoolLimits = DEFAULT_LIMITS, tls: ssl.SSLContext | None = None) -> None:
        self._limits = limits
        self._tls = tls
        self._origins: dict[Origin, _OriginPool] = {}
        self._closed = False

    async def request(
        self,
        method: str,
        url: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        *,
        deadline_s: float,
    ) -> Response:
        """Send a request and return when its response's head is here; ``deadline_s`` is for all of it, body included.

        Cancelled, it closes the connection. Raises UpstreamError, and ValueError for what is no URL or no header.
        """
        origin, target = split_url(url)
        head = request_head(method, origin, target, headers, len(body))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        connection = await self.acquire(origin, deadline)
        response = Response(connection, loop)
        connection.start(head, body, response, deadline)
        try:
            await response.opened()
        except BaseException:
            response.close()
            raise
        return response

    def idle(self, origin: Origin) -> Connection | None:
        """A connection that is open and free, the one used last, or None. It is the caller's to start at once."""
        pool = self._origins.get(origin)
        return None if pool is None else pool.take()

    async def acquire(self, origin: Origin, deadline: float) -> Connection:
        """A free connection, if need be a new one, to be started at once. ``deadline``: the event loop's time.

        Raises UpstreamError: connect_failed, connect_timeout, tls_failed, pool_full, deadline.
        """
        if self._closed:
            raise UpstreamError(Cause.CLOSED, "this client was closed")
        pool = self._origins.get(origin)
        if pool is None:
            pool = self._origins[origin] = _OriginPool(origin, self._limits, self._tls, asyncio.get_running_loop())
        return pool.take() or await pool.wait(deadline)

    def open(self, origin: Origin) -> int:
        """How many connections there are to an origin, those at work included."""
        pool = self._origins.get(origin)
        return 0 if pool is None else pool.open

    def close(self) -> None:
        """Close all that are free, and let no other be opened; exchanges that run end by themselves. Idempotent."""
        self._closed = True
        for pool in self._origins.values():
            pool.close()


class _OriginPool:
    """The connections of one origin."""

    def __init__(
        self, origin: Origin, limits: PoolLimits, tls: ssl.SSLContext | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.open = 0
        self._origin = origin
        self._limits = limits
        self._tls = tls
        self._loop = loop
        self._idle: deque[Connection] = deque()
        self._waiting: deque[asyncio.Future[Connection | None]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self) -> Connection | None:
        """The free connection that was used last. Those that grew too old are closed."""
        oldest = self._loop.time() - self._limits.idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.abandon()
        return None

    async def wait(self, deadline: float) -> Connection:
        """A new connection where one more may be opened, else the first that is free. Raises UpstreamError."""
        while self.open >= self._limits.connections:
            handed = await self._turn(deadline)
            if handed is not None and handed.usable:
                return handed
        return await self._connect(deadline)

    async def _turn(self, deadline: float) -> Connection | None:
        """A connection that became free, or None for the right to look again."""
        if len(self._waiting) >= self._limits.waiting:
            detail = f"{self.open} connections are at work and {len(self._waiting)} requests wait for one"
            raise UpstreamError(Cause.POOL_FULL, detail)
        turn: asyncio.Future[Connection | None] = self._loop.create_future()
        self._waiting.append(turn)
        timer = self._loop.call_at(deadline, _late, turn)
        try:
            return await turn
        except asyncio.CancelledError:
            self._give_back(turn)
            raise
        finally:
            timer.cancel()
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _give_back(self, turn: asyncio.Future[Connection | None]) -> None:
        """What was handed to somebody who has left meanwhile."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            connection = turn.result()
            if connection is None:
                self._wake()
            else:
                self.on_free(connection)

    async def _connect(self, deadline: float) -> Connection:
        self.open += 1
        created: list[Connection] = []
        made = late = False
        patience = min(self._limits.connect_s, max(0.0, deadline - self._loop.time()))
        origin = self._origin
        if origin.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()  # once: it reads every root of the system
        tls = self._tls if origin.scheme == "https" else None

        def factory() -> Connection:
            created.append(Connection(self, self._loop))
            return created[-1]

        def give_up() -> None:
            nonlocal late
            late = making.cancel()

        making = self._loop.create_task(self._loop.create_connection(factory, origin.host, origin.port, ssl=tls))
        timer = self._loop.call_later(patience, give_up)
        try:
            transport, connection = await making
            made = True
        except asyncio.CancelledError:
            if not late:
                raise
            raise UpstreamError(Cause.CONNECT_TIMEOUT, f"no connection within {patience:.3g} s") from None
        except ssl.SSLError as error:
            raise UpstreamError(Cause.TLS, str(error)[:200]) from error
        except OSError as error:
            raise UpstreamError(Cause.CONNECT, str(error)[:200]) from error
        finally:
            timer.cancel()
            if not made:
                begun = [one for one in created if one.connected]
                for one in begun:  # it was open when time ran out: what ends it is counted in ``on_lost``
                    one.abandon()
                if not begun:
                    self.open -= 1
                    self._wake()
        self._loop.call_later(WATCHED_AFTER_S, _watch, transport)
        return connection

    # ---- what connections say

    def on_free(self, connection: Connection) -> None:
        """Hand it to who waits longest, or keep it."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return
        if self._closed or len(self._idle) >= self._limits.idle or not connection.usable:
            connection.abandon()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._limits.idle_s, self._close_old)

    def on_lost(self, connection: Connection) -> None:
        """Room for another one."""
        self.open -= 1
        if connection in self._idle:
            self._idle.remove(connection)
        self._wake()

    def close(self) -> None:
        """Close what is free."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        while self._idle:
            self._idle.pop().abandon()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _close_old(self) -> None:
        self._sweep = None
        oldest = self._loop.time() - self._limits.idle_s
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.popleft().abandon()
        if self._idle:
            self._sweep = self._loop.call_at(self._idle[0].idle_since + self._limits.idle_s, self._close_old)


def _late(turn: asyncio.Future[Connection | None]) -> None:
    if not turn.done():
        turn.set_exception(UpstreamError(Cause.DEADLINE, "no connection became free in time"))


def _watch(transport: asyncio.BaseTransport) -> None:
    """Have the kernel notice when the other end vanishes."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if transport.is_closing() or sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
