"""An httpx transport to a gateway in this process: its own HTTP protocol, no sockets, from any address."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, cast

import httpcore
import httpx
import uvicorn
from uvicorn.server import ServerState

from gateway.app import Gateway
from gateway.front import Front


class DirectTransport(httpx.AsyncHTTPTransport):
    """Requests of whoever has this address."""

    def __init__(self, gateway: Gateway, address: str = "127.0.0.1") -> None:
        super().__init__()
        config = uvicorn.Config(gateway, http=Front, log_config=None, access_log=False)
        config.load()
        self._pool = httpcore.AsyncConnectionPool(network_backend=_Backend(config, address))


class _Backend(httpcore.AsyncNetworkBackend):
    def __init__(self, config: uvicorn.Config, address: str) -> None:
        self._config = config
        self._address = address

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        return _Stream(self._config, self._address)


class _Stream(httpcore.AsyncNetworkStream):
    """The client's end."""

    def __init__(self, config: uvicorn.Config, address: str) -> None:
        self._wire = _Wire(address)
        self._wire.set_protocol(Front(config, ServerState(), {}))
        self._wire.protocol.connection_made(self._wire)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 (httpcore's)
        async with asyncio.timeout(timeout):
            while not self._wire.answered and not self._wire.closed:
                self._wire.more.clear()
                await self._wire.more.wait()
        data = bytes(self._wire.answered[:max_bytes])
        del self._wire.answered[:max_bytes]
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 (httpcore's)
        if buffer:
            self._wire.protocol.data_received(buffer)

    async def aclose(self) -> None:
        self._wire.closed = True
        self._wire.protocol.connection_lost(None)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        raise NotImplementedError

    def get_extra_info(self, info: str) -> Any:
        return None


class _Wire(asyncio.Transport):
    """The gateway's end."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 5000), "sockname": ("127.0.0.1", 8000)})
        self.answered = bytearray()
        self.more = asyncio.Event()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.answered += data
        self.more.set()

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self.write(b"".join(parts))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast(asyncio.Protocol, protocol)

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True
        self.more.set()

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        """It is never far ahead."""

    def resume_reading(self) -> None:
        """As above."""
