"""Running a gateway: checks before binding, uvicorn, and a shutdown that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn

from gateway.app import Gateway
from gateway.config import ConfigError, GatewayConfig
from gateway.model import load_model
from gateway.protocol import BoundedHttp
from gateway.state import State
from kvcache.control import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """uvicorn, but the first signal drains: it would close the nodes' streams, and with them every answer."""

    def __init__(self, gateway: Gateway) -> None:
        config = gateway.config
        super().__init__(
            uvicorn.Config(
                gateway,
                log_config=None,
                access_log=False,
                http=BoundedHttp,
                server_header=False,
                proxy_headers=False,
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=2,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        self._gateway = gateway
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: refuse new requests, wait for those at hand, then stop. Second: stop now."""
        if self._gateway.generation.in_flight.draining:
            self.should_exit = self.force_exit = True
            return
        self._gateway.generation.in_flight.draining = True
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._gateway.config.drain_s):
                await self._gateway.generation.in_flight.drained()
        except TimeoutError:
            log.warning("drain cut short after_s=%g", self._gateway.config.drain_s)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind, then say where."""
        await super().startup(sockets=sockets)
        if self.started:
            scheme = "http" if self._gateway.config.tls_cert is None else "https"
            port = self.servers[0].sockets[0].getsockname()[1]
            print(f"prfaas gateway: listening on {scheme}://{self._gateway.config.host}:{port}", flush=True)


def open_gateway(config: GatewayConfig) -> Gateway:
    """Read the model and the state. Raises ConfigError, also where it would not be safe to listen."""
    state = State(config.state_file)
    try:
        model = load_model(config.model_dir, config.model_name, config.dtype, config.chat_template)
        gateway = Gateway(config, model, state)
        config.check_exposure(has_keys=len(gateway.keys) > 0)
    except BaseException:
        state.close()
        raise
    return gateway


def serve(config: GatewayConfig) -> None:
    """Run until a signal. Raises ConfigError where the address or the TLS files cannot be used."""
    gateway = open_gateway(config)
    try:
        server = GatewayServer(gateway)
        try:
            server.config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: {error}") from error
        with _listen(config.host, config.port) as listener:
            server.run(sockets=[listener])
    finally:
        gateway.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from error
