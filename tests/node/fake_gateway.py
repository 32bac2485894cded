"""A strict little gateway: takes nodes in over a WebSocket, keeps what they say, says what the test wants."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar

from aiohttp import WSMsgType, web

from kvcache import control
from kvcache.control import Beat, FromNode, Heartbeat, Join, Refused, ToNode, Welcome
from kvcache.control.replicas import Already

T = TypeVar("T")


class FakeGateway:
    """Start it with ``async with``; ``url`` is where it is. ``beating`` False makes it fall silent after Welcome."""

    def __init__(self, token: str | None = None, ticket_key: bytes = bytes(32)) -> None:
        self.token = token
        self.ticket_key = ticket_key
        self.gateway_id = ""
        self.refusal: Refused | None = None
        self.status: int | None = None
        self.beating = True
        self.reading = True
        self.beat_s = 0.1
        self.joins: list[Join] = []
        self.heard: dict[str, list[FromNode]] = {}
        self.sockets: dict[str, web.WebSocketResponse] = {}
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeGateway:
        await self.listen()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/nodes/stream", self._stream)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        for socket in list(self.sockets.values()):
            await socket.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def send(self, node: str, message: ToNode) -> None:
        await self.sockets[node].send_bytes(control.encode(message))

    async def until(self, condition: Callable[[], T], within: float = 10.0) -> T:
        async with asyncio.timeout(within):
            while not (found := condition()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return found

    async def hears(
        self, node: str, kind: type[T], where: Callable[[T], bool] = lambda _: True, within: float = 10.0
    ) -> T:
        """The first message of this kind from ``node`` for which ``where`` holds, present or to come."""

        def find() -> T | None:
            return next((m for m in self.heard.get(node, []) if isinstance(m, kind) and where(m)), None)

        try:
            return await self.until(find, within)
        except TimeoutError:
            rest = {name: [m for m in heard if not isinstance(m, Heartbeat)] for name, heard in self.heard.items()}
            beats = {name: heartbeats(self, name)[-1:] for name in self.heard}
            raise AssertionError(f"{node} said no such {kind}; heard were {rest}, last {beats}") from None

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.status is not None:
            return web.Response(status=self.status)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        socket = web.WebSocketResponse(max_msg_size=control.MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        join = control.decode_from_node(await socket.receive_bytes())
        assert isinstance(join, Join)
        self.joins.append(join)
        if self.refusal is not None:
            await socket.send_bytes(control.encode(self.refusal))
            await socket.close()
            return socket
        if self.gateway_id in join.gateways:
            await socket.send_bytes(control.encode(Already(self.gateway_id)))
            await socket.close()
            return socket
        self.sockets[join.node_id] = socket
        heard = self.heard.setdefault(join.node_id, [])
        await socket.send_bytes(control.encode(Welcome(self.ticket_key, self.beat_s, 3.5, self.gateway_id)))
        beats = asyncio.create_task(self._beat(socket))
        try:
            await self._read(socket, heard)
        finally:
            beats.cancel()
            if self.sockets.get(join.node_id) is socket:
                del self.sockets[join.node_id]
        return socket

    async def _read(self, socket: web.WebSocketResponse, heard: list[FromNode]) -> None:
        while self.reading:
            message = await socket.receive()
            if message.type is not WSMsgType.BINARY:
                return
            heard.append(control.decode_from_node(message.data))
        while not socket.closed:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _beat(self, socket: web.WebSocketResponse) -> None:
        while True:
            await asyncio.sleep(self.beat_s)
            if self.beating:
                await socket.send_bytes(control.encode(Beat()))


def heartbeats(gateway: FakeGateway, node: str) -> list[Heartbeat]:
    return [m for m in gateway.heard.get(node, []) if isinstance(m, Heartbeat)]
