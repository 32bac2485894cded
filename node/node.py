"""The node process: one pool, one KV endpoint, one engine, both sides of a transfer, a stream to each gateway.

Only what the parts are to each other, and the order in which they begin and end, is decided here: what uses memory ends
before the memory does.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from decode_client.auditing import KvAuditor
from decode_client.client import DecodeClient
from decode_client.context import ClientContext, ClientLimits
from kvcache.codecs.candidates import candidates
from kvcache.codecs.meter import CodecMeter
from kvcache.control import KvAddress
from kvcache.room import PageRoom
from kvcache.tracer import tracer_for
from kvcache.tracing import Tracer
from kvcache.transport import KvEndpoint, LocalIdentity, TransportLimits
from node.carriers import carriers
from node.codec_start import measure
from node.config import CODEC_THREADS, ConfigError, KvPort, NodeConfig
from node.control import ControlHandler, ControlStream, CredentialsRefused
from node.credentials import Credentials
from node.engines import StartEngine
from node.enrolment import Enrolled
from node.event_feed import EventFeeds
from node.event_socket import EventSocket
from node.gateways import Gateways
from node.identity import Identity
from node.keeper import EngineKeeper
from node.model import NodeModel
from node.orders import Orders
from node.presence import Presence, most_answers
from node.rates import Rates
from node.readiness import Readiness
from node.roles import NodeRole
from node.router import FrameRouter
from node.sides import Sides
from node.storage import Storage
from node.topology.discover import discover
from node.topology.machine import ThisMachine
from prefill_service.context import ServiceContext, ServiceLimits
from prefill_service.service import PrefillService

NOTICE_S = 0.3
"""How long a heartbeat and what was sent before it came may be on their way between here and a gateway."""


class Node:
    """``start``, then ``run`` until it returns, then ``close``."""

    def __init__(
        self, config: NodeConfig, model: NodeModel, start_engine: StartEngine, enrolled: Enrolled | None = None
    ) -> None:
        """Takes the pool's memory; nothing runs yet. Raises ConfigError for what cannot be, such as a pool's size."""
        self._config = config
        self._model = model
        self._identity = Identity.fresh(config.node_id)
        self._credentials = Credentials(config, enrolled, lambda asked: self._gateways.send_all(asked))
        self._tracer = _tracer(config)
        self._rates = Rates()
        self._executor = ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="kv-codec")
        self._codecs = candidates(model.layout, model.transforms)
        self._meter = CodecMeter(each.name for each in self._codecs)
        self._storage = Storage(config, model, lambda: self._rates.prefill)
        self._keeper = EngineKeeper(lambda: start_engine(self._storage.pool), self._beat)
        asking = self._client_context()
        self._sides = Sides(PrefillService(self._service_context()), DecodeClient(asking))
        self._auditor = KvAuditor(asking)
        self._role = NodeRole(
            config.role,
            self._identity.incarnation,
            self._sides.settled,
            lambda gateway, answer: self._gateways.send(gateway, answer),
            self._beat,
            self._noticed,
        )
        self._readiness = Readiness(self._keeper, self._role, self._storage.room)
        self._endpoint = KvEndpoint(
            LocalIdentity(
                config.node_id,
                self._identity.incarnation,
                self._identity.key,
                model.fingerprint.digest(),
                lambda: self._role.role,
            ),
            FrameRouter(self._sides.serving, self._sides.asking),
            self._credentials.dial,
            TransportLimits(connections=config.kv_connections),
        )
        self._presence = Presence(
            config,
            model,
            self._identity,
            self._role,
            self._readiness,
            self._storage,
            self._sides,
            self._keeper,
            self._rates,
            self._meter,
            self._endpoint,
        )
        storage = self._storage
        self._feeds = EventFeeds(storage.events, lambda: storage.cache, lambda gateway: self._gateways.stream(gateway))
        orders = Orders(
            self._presence,
            self._readiness,
            self._role,
            self._sides,
            self._auditor,
            self._feeds,
            self._endpoint,
            self._credentials,
            self._rates,
            lambda: self._gateways,
        )
        self._gateways = Gateways(config.stream_urls, orders, self._dial)
        self._event_socket: EventSocket | None = None

    @property
    def kv_address(self) -> KvAddress | None:
        """Where peers reach this node; None while it opens no port."""
        return self._presence.kv_address

    @property
    def room(self) -> PageRoom:
        """Who holds which page."""
        return self._storage.room

    async def start(self) -> None:
        """Load the engine, open the KV port. Raises EngineLost, ConfigError or InsecureBind; ``close`` is due then."""
        loop, presence = asyncio.get_running_loop(), self._presence
        presence.codec_start = await loop.run_in_executor(
            self._executor, measure, self._model.layout, self._config.chunk_tokens, self._codecs
        )
        looking = loop.run_in_executor(self._executor, discover, ThisMachine(), self._config.place)
        presence.engine = (await self._keeper.start()).info
        presence.machine = await looking
        self._rates.measured(presence.engine.prefill_tokens_per_s, presence.engine.decode_tokens_per_s)
        presence.transports = self._endpoint.open_lanes(carriers(self._config, self._identity, presence.machine))
        self._storage.start()
        port = self._config.kv_port
        if port is not None:
            bound = await self._listen(port)
            presence.kv_address = port.advertise or KvAddress(port.host, bound)
        if self._config.kv_events is not None:
            topic = f"kv@{self._config.node_id}@{self._config.model_name}"
            self._event_socket = EventSocket(self._config.kv_events, topic, self._storage.events)

    async def run(self, stop: asyncio.Event, drain_s: float = 2.0) -> None:
        """Serve the gateways until ``stop``, then finish what can be finished in ``drain_s``. Raises NodeRefused."""
        works = [self._gateways.run(), self._keeper.run(), _wait(stop), *self._credentials.works()]
        if self._event_socket is not None:
            works.append(self._event_socket.run())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
            await self._drain(drain_s)
        except CredentialsRefused:
            self._credentials.refused()
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def reload_certificate(self) -> None:
        """Take the KV port's certificate anew, without waiting for its files to be seen to change."""
        self._credentials.reload()

    async def joined(self) -> None:
        """Return once a gateway has accepted this node for the first time."""
        await self._presence.joined()

    async def close(self) -> None:
        """End every job, connection, process and mapping, in this order. Idempotent."""
        self._role.cancel()
        self._feeds.close()
        await self._sides.close()
        await self._auditor.close()
        await self._endpoint.close()
        await self._keeper.close()
        if self._event_socket is not None:
            self._event_socket.close()
        self._executor.shutdown()
        await asyncio.to_thread(self._tracer.close)
        await self._storage.close()

    # ---- inside

    def _dial(self, url: str, handler: ControlHandler) -> ControlStream:
        return ControlStream(url, handler, join_token=self._credentials.join_token, tls=self._credentials.gateway)

    def _beat(self) -> None:
        self._gateways.beat_now()

    async def _listen(self, port: KvPort) -> int:
        try:
            return await self._endpoint.listen(port.host, port.port, self._credentials.listen)
        except (OSError, UnicodeError) as error:  # the latter for a host that cannot be a name
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"--kv-host {port.host} --kv-port {port.port}: cannot listen there: {why}") from error

    async def _noticed(self) -> None:
        if len(self._gateways.joined) > 1:
            await asyncio.sleep(NOTICE_S)

    async def _drain(self, drain_s: float) -> None:
        self._readiness.draining = True
        self._beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._sides.settled()
        await self._sides.close()
        await self._gateways.flush(0.5)

    def _service_context(self) -> ServiceContext:
        return ServiceContext(
            incarnation=self._identity.incarnation,
            limits=ServiceLimits(max_queue=self._config.max_queue),
            **self._shared(),
        )

    def _client_context(self) -> ClientContext:
        return ClientContext(
            public_key=self._identity.public_key,
            tokenizer=self._model.tokenizer,
            limits=ClientLimits(self._config.max_queue + self._config.max_running, most_answers(self._config)),
            **self._shared(),
        )

    def _shared(self) -> dict[str, Any]:
        """What jobs of either side have of their node."""
        return {
            "node_id": self._identity.node_id,
            "fingerprint": self._model.fingerprint.digest(),
            "chunk_tokens": self._config.chunk_tokens,
            "geometry": self._storage.geometry,
            "pool": self._storage.pool,
            "room": self._storage.room,
            "engine": lambda: self._keeper.engine,
            "executor": self._executor,
            "endpoint": lambda: self._endpoint,
            "report": self._rates.observe,
            "transforms": self._model.transforms,
            "tracer": self._tracer,
            "checkpoints": self._config.checkpoints,
            "meter": self._meter,
            "tiers": self._storage.tiers,
        }


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()


def _tracer(config: NodeConfig) -> Tracer:
    try:
        return tracer_for(config.otlp_endpoint, "prfaas-node", config.node_id)
    except ValueError as error:
        raise ConfigError(f"--otlp-endpoint: {error}") from error
