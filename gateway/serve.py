"""Running a gateway: checks before binding, uvicorn, and a shutdown that lets requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from gateway.app import Gateway
from gateway.certificates import files
from gateway.config import ConfigError, GatewayConfig
from gateway.errors import ApiError
from gateway.front import Front
from gateway.handover import Offer, Successor
from gateway.joining.handshakes import count_refused
from gateway.joining.stream_protocol import StreamProtocol
from gateway.model import served_model
from gateway.protocol import BoundedHttp
from gateway.reloading import Reloading
from gateway.shared.link import RedisAway
from gateway.shared.settings import RedisSettings
from gateway.shared.together import take_first
from gateway.state import State
from gateway.workers.exposition import SharedExposition
from gateway.workers.leaving import leave_shared
from gateway.workers.worker import Worker, listen
from kvcache.certificate_files import CertificateFiles
from kvcache.control import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

EXPECT_NODES_S = 15.0
"""How long requests wait for nodes of a gateway whose clients are there already, after a takeover or as a worker: nodes
are on their way."""
LOOK_EVERY_S = 0.2
LEAVE_IDLE_S = 3.0
"""How long a gateway that was taken over from waits for another request on its open connections."""
KEEP_ALIVE_S = 75
"""An idle connection is kept longer than what stands before gateways keeps theirs: it is theirs to close, for a request
that meets a close on its way is lost."""


def tls_options(config: GatewayConfig) -> dict[str, Any]:
    """What uvicorn is told of TLS. Clients need no certificate; one that is shown must come from the roots of --ca."""
    own = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
    if config.ca_dir is None:
        return own
    return own | {"ssl_ca_certs": str(config.ca_dir / files.ROOT), "ssl_cert_reqs": ssl.CERT_OPTIONAL}


def followed(config: GatewayConfig, context: ssl.SSLContext) -> CertificateFiles | None:
    """The files that ``context`` was made of by ``tls_options``, to be taken anew when they change."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    roots = None if config.ca_dir is None else config.ca_dir / files.ROOT
    return CertificateFiles(config.tls_cert, config.tls_key, [context], roots, [] if roots is None else [context])


class GatewayServer(uvicorn.Server):
    """uvicorn, but the first signal drains: it would close the nodes' streams, and with them every answer."""

    def __init__(
        self, gateway: Gateway, successor: Successor | None, worker: Worker | None, early_hangup: threading.Event
    ) -> None:
        config = gateway.config
        super().__init__(
            uvicorn.Config(
                gateway,
                log_config=None,
                access_log=False,
                http=Front,
                server_header=False,
                proxy_headers=False,
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=KEEP_ALIVE_S,
                ws=StreamProtocol,
                **tls_options(config),
            )
        )
        self._gateway = gateway
        self._successor = successor
        self._early_hangup = early_hangup
        self._offer: Offer | None = None
        self._worker = worker
        self._exposition = None if worker is None else SharedExposition(worker, gateway.metrics.render)
        self._tasks: list[asyncio.Task[None]] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: linger, refuse new requests, wait for those at hand, then stop. Second: stop now."""
        in_flight = self._gateway.generation.in_flight
        if in_flight.leaving:
            self.should_exit = self.force_exit = True
            return
        in_flight.leaving = True
        in_flight.draining = not self._gateway.config.linger_s
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: self._tasks.append(loop.create_task(self._drain())))

    def _hang_up(self) -> None:
        with contextlib.suppress(ConfigError):  # which has been logged; who sent the signal reads the log
            self._gateway.reload()

    def _taken_over(self) -> None:
        """A successor serves: leave it all that is new, finish what is at hand."""
        log.info("handed over requests=%d", self._gateway.generation.in_flight.count)
        for server in self.servers:
            server.close()
        self._let_go()
        self._tasks.append(asyncio.get_running_loop().create_task(self._leave()))

    def _let_go(self) -> None:
        """Whoever is served on an open connection asks another gateway next time."""
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)
        self.server_state.default_headers = [*self.server_state.default_headers, close]

    async def _leave(self) -> None:
        await self._gateway.leave()
        deadline = asyncio.get_running_loop().time() + self._gateway.config.drain_s
        idle_since = None
        while (now := asyncio.get_running_loop().time()) < deadline and self._clients():
            busy = self._gateway.generation.in_flight.count > 0
            idle_since = None if busy else idle_since or now
            if idle_since is not None and now >= idle_since + LEAVE_IDLE_S:
                break  # who has said nothing for so long is told by the connection's end
            await asyncio.sleep(LOOK_EVERY_S)
        if self._gateway.generation.in_flight.count:
            log.warning("drain cut short after_s=%g", self._gateway.config.drain_s)
        self.should_exit = True

    def _clients(self) -> bool:
        """Whether a client's connection is open, busy or not."""
        return any(isinstance(each, (Front, BoundedHttp)) for each in self.server_state.connections)

    async def _drain(self) -> None:
        if self._worker is not None and self.started:
            await leave_shared(self.servers[0], self._take)  # whoever connects from now on gets another worker
        if self._gateway.config.linger_s:
            self._let_go()
            await asyncio.sleep(self._gateway.config.linger_s)
            self._gateway.generation.in_flight.draining = True
        try:
            async with asyncio.timeout(self._gateway.config.drain_s):
                await self._gateway.generation.in_flight.drained()
        except TimeoutError:
            log.warning("drain cut short after_s=%g", self._gateway.config.drain_s)
        self.should_exit = True

    async def _take(self, client: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere."""
        config = self.config

        def made() -> asyncio.Protocol:
            protocol: asyncio.Protocol = Front(config, self.server_state, self.lifespan.state)
            return protocol

        await asyncio.get_running_loop().connect_accepted_socket(made, client, ssl=config.ssl)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, then say where; a predecessor may go from then on."""
        if self._successor is not None or self._worker is not None:
            self._gateway.waiting.expect_nodes(EXPECT_NODES_S)
        await super().startup(sockets=sockets)
        if self.started:
            listener = self.servers[0].sockets[0]
            port = listener.getsockname()[1]
            await self._begin(listener)
            if self._worker is not None and self._worker.number > 0:
                return
            scheme = "http" if self._gateway.config.tls_cert is None else "https"
            host = self._gateway.config.host.strip("[]")
            at = f"[{host}]" if ":" in host else host
            print(f"prfaas gateway: listening on {scheme}://{at}:{port}", flush=True)

    async def _begin(self, listener: socket.socket) -> None:
        # What is there now stays: to look through it again and again took a twentieth of every request.
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        if self._early_hangup.is_set():
            self._hang_up()
        self._tasks.append(loop.create_task(self._gateway.follow_certificate()))
        if self._exposition is not None:
            await self._exposition.start()
            self._gateway.metrics.together = self._exposition.render
        if self._successor is not None:
            self._successor.ready()
        path = self._gateway.config.handover
        if path is not None:
            self._offer = Offer(path, listener, self._taken_over)
            self._offer.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what was begun here, then what uvicorn began."""
        if self._offer is not None:
            await self._offer.stop()
        if self._exposition is not None:
            await self._exposition.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets=sockets)


def open_gateway(config: GatewayConfig) -> Gateway:
    """Read the model and the state. Raises ConfigError, also where it would not be safe to listen."""
    state = State(config.state_file)
    try:
        model = served_model(config)
        if config.redis is not None:
            _catch_up(config.redis, state)
        gateway = Gateway(config, model, state)
        if config.admin_key is not None:
            _ensure_admin(gateway, config.admin_key)
        config.check_exposure(has_keys=len(gateway.keys) > 0)
    except BaseException:
        state.close()
        raise
    return gateway


def _ensure_admin(gateway: Gateway, secret: str) -> None:
    try:
        gateway.keys.ensure_admin(secret)
    except ApiError as error:
        raise ConfigError(f"--admin-key-file: {error}") from error


@contextlib.contextmanager
def _hangup_noted() -> Iterator[threading.Event]:
    """A SIGHUP that comes before the gateway can heed it, which would end the process, is heeded when it can.

    Noted, not blocked: what is blocked in one thread is delivered to another, and libraries have started some by then.
    """
    noted = threading.Event()
    before = signal.signal(signal.SIGHUP, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGHUP, before)


def serve(config: GatewayConfig, reread: Callable[[], GatewayConfig], worker: Worker | None = None) -> None:
    """Run until a signal, or until a successor has taken over. ``reread`` gives the configuration anew.

    ``worker``: which one this process is of several that share the port.

    Raises ConfigError where the address, the TLS files or the handover cannot be used.
    """
    with _hangup_noted() as early_hangup:
        _serve(config, reread, worker, early_hangup)


def _serve(
    config: GatewayConfig,
    reread: Callable[[], GatewayConfig],
    worker: Worker | None,
    early_hangup: threading.Event,
) -> None:
    _allow_files(config.max_in_flight)
    gateway = open_gateway(config)
    try:
        with contextlib.ExitStack() as held:
            successor = None if config.handover is None else Successor.take(config.handover)
            listeners = []
            if worker is not None:
                listeners = [held.enter_context(each) for each in worker.listeners(config.host)]
            elif successor is None:
                listeners = [held.enter_context(listen(config.host, config.port, shared=False))]
            else:
                held.callback(successor.close)
                listeners = [held.enter_context(successor.listener)]
                _check_port(listeners[0], config)
            own_port = listeners[-1].getsockname()[1]
            gateway.url = config.url(own_port) if worker is None else worker.url(config, own_port)
            server = GatewayServer(gateway, successor, worker, early_hangup)
            try:
                server.config.load()
            except OSError as error:  # ssl.SSLError is one
                raise ConfigError(f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: {error}") from error
            context = server.config.ssl
            if context is not None:
                count_refused(context, gateway.refusals)
            certificate = None if context is None else followed(config, context)
            gateway.reloading = Reloading(gateway.live, reread, certificate)
            server.run(sockets=listeners)
    finally:
        gateway.close()


def _catch_up(redis: RedisSettings, state: State) -> None:
    """What other gateways know counts here from the first request on; where Redis is away, what the file knows."""
    try:
        asyncio.run(take_first(redis, state))
    except RedisAway as away:
        log.warning("begins with what --state knows: %s", away)


def _allow_files(requests: int) -> None:
    """A request takes a socket on either side; systems allow 1,024 of them where nobody asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * requests + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _check_port(listener: socket.socket, config: GatewayConfig) -> None:
    held = listener.getsockname()[1]
    if config.port not in (0, held):
        raise ConfigError(
            f"--port {config.port}, but the gateway at --handover {config.handover} listens on {held}: "
            "another port needs a restart"
        )
