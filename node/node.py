"""The node process: one pool, one KV endpoint, one engine, both sides of a transfer, a stream to each gateway.

It holds both sides whatever its role is. Only the order in which things begin and end is decided here: what uses
memory ends before the memory does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

import msgspec

from decode_client.auditing import KvAuditor
from decode_client.client import DecodeClient
from decode_client.context import ClientContext, ClientLimits
from engines.process import EngineProcess
from engines.protocol import Engine, EngineInfo, Loading, TellsFigures
from engines.spec import EngineSpec
from kvcache.blocks import PageGeometry, PagePool
from kvcache.certificate_files import CertificateFiles
from kvcache.codecs.candidates import candidates
from kvcache.codecs.meter import CodecMeter
from kvcache.control import (
    Cancel,
    Cancelled,
    ChangeRole,
    CodecWork,
    Delta,
    Drain,
    Failed,
    Finished,
    FromNode,
    GenerateJob,
    Heartbeat,
    Join,
    KvAddress,
    KvSource,
    ModelInfo,
    Order,
    PrefillJob,
    PrefillStarted,
    ProbeLink,
    RateLease,
    ReplayKvEvents,
    RoleChanged,
    SharePrefix,
    TakePrefix,
    Welcome,
)
from kvcache.hostpool import HostPool
from kvcache.kept import recomputation
from kvcache.kv_audit import AuditKv
from kvcache.layout import GroupKind
from kvcache.prefix_cache import PrefixCache
from kvcache.renewal import CertificateIssued
from kvcache.room import PageRoom
from kvcache.ticket import claimed_transfer
from kvcache.tiers.hierarchy import Tiers
from kvcache.topology import MachineReport, encode_report
from kvcache.tracing import tracer_for
from kvcache.transport import KvEndpoint, LocalIdentity, TransportLimits
from node.carriers import carriers
from node.codec_start import measure
from node.config import ConfigError, KvPort, NodeConfig, pool_pages
from node.control import ControlHandler, ControlStream, CredentialsRefused
from node.enrolment import Enrolled
from node.event_feed import EventFeeds
from node.event_log import EventLog
from node.event_socket import EventSocket
from node.gateways import Gateways
from node.identity import Identity
from node.keeper import EngineKeeper
from node.model import NodeModel
from node.ranks import Ranks
from node.rates import Rates
from node.renewal import Renewal
from node.roles import NodeRole
from node.router import FrameRouter
from node.tiers import make_levels
from node.tls import (
    certificate_told,
    dialling_context,
    gateway_context,
    listening_context,
    operators_certificate,
)
from node.topology.discover import discover
from node.topology.machine import ThisMachine
from prefill_service.context import ServiceContext, ServiceLimits
from prefill_service.service import PrefillService

log = logging.getLogger(__name__)

BLOCK_TOKENS = 64
CODEC_THREADS = 2
NOTICE_S = 0.3
"""How long a heartbeat and what was sent before it came may be on their way between here and a gateway."""

StartEngine = Callable[[HostPool], Awaitable[Engine]]


class Node:
    """``start``, then ``run`` until it returns, then ``close``."""

    def __init__(
        self, config: NodeConfig, model: NodeModel, start_engine: StartEngine, identity: Enrolled | None = None
    ) -> None:
        """Takes the pool's memory; nothing runs yet. Raises ConfigError for a pool of an impossible size, or tiers."""
        self._config = config
        self._model = model
        self._geometry = PageGeometry.of(model.layout, BLOCK_TOKENS)
        pages = pool_pages(config.pool_bytes, self._geometry.page_bytes)
        self._identity = Identity.fresh(config.node_id)
        self._fingerprint = model.fingerprint.digest()
        kv_tls = config.kv_tls if identity is None or config.kv_tls.complete else identity.enrolment.files
        self._gateway_tls = gateway_context(config.gateway_ca, None if identity is None else identity.enrolment.files)
        self._listen_tls, dial_tls = listening_context(kv_tls), dialling_context(kv_tls)
        self._renewal = None if identity is None else self._renewing(identity, dial_tls)
        self._kv_certificate = operators_certificate(config.kv_tls, self._listen_tls, dial_tls)
        self._rates = Rates()
        self._prefill_ranks, self._speech_ranks = Ranks(), Ranks()
        try:
            self._tracer = tracer_for(config.otlp_endpoint, "prfaas-node", config.node_id)
        except ValueError as error:
            raise ConfigError(f"--otlp-endpoint: {error}") from error
        self._executor = ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="kv-codec")
        self._codecs = candidates(model.layout, model.transforms)
        self._meter = CodecMeter(each.name for each in self._codecs)
        self._pool = HostPool.create(self._geometry.page_bytes, pages)
        kinds = {group.kind for group in model.layout.groups}
        self._events = EventLog(BLOCK_TOKENS, "mamba" if GroupKind.STATE in kinds else "sliding_window")
        page_pool, snapshots = PagePool(pages), kinds != {GroupKind.FULL}
        levels = make_levels(config.tiers, self._geometry.page_bytes)
        self._tiers = (
            Tiers(levels, self._geometry.page_bytes, self._events, lambda: self._rates.prefill) if levels else None
        )
        self._cache = PrefixCache(
            page_pool,
            BLOCK_TOKENS,
            snapshots=snapshots,
            value=recomputation if self._tiers is None else self._tiers.costs.value,
            listener=self._events if self._tiers is None else self._tiers.telling,
        )
        waiting = config.max_queue + config.max_running
        self._room = PageRoom(page_pool, waiting, self._cache if config.prefix_cache else None)
        if self._tiers is not None:
            self._events.tiers = self._tiers
            self._tiers.attach(
                self._cache, self._room, self._pool, self._fingerprint, time.monotonic, snapshots=snapshots
            )
        self._feeds = EventFeeds(self._events, lambda: self._cache, lambda gateway: self._gateways.stream(gateway))
        self._event_socket: EventSocket | None = None
        self._keeper = EngineKeeper(lambda: start_engine(self._pool), self._beat)
        self._serving = PrefillService(self._service_context())
        self._asking = DecodeClient(self._client_context())
        self._auditor = KvAuditor(self._client_context())
        self._role = NodeRole(
            config.role, self._identity.incarnation, self._settled, self._answer, self._beat, self._noticed
        )
        self._endpoint = KvEndpoint(
            LocalIdentity(
                config.node_id,
                self._identity.incarnation,
                self._identity.key,
                self._fingerprint,
                lambda: self._role.role,
            ),
            FrameRouter(self._serving, self._asking),
            dial_tls,
            TransportLimits(connections=config.kv_connections),
        )
        self._gateways = Gateways(config.stream_urls, self, self._dial)
        self._info: EngineInfo | None = None
        self._codec_start: tuple[CodecWork, ...] = ()
        self._machine = MachineReport()
        self._kv_address: KvAddress | None = None
        self._transports: tuple[str, ...] = ()
        self._draining = False
        self._welcomed = asyncio.Event()

    @property
    def kv_address(self) -> KvAddress | None:
        """Where peers reach this node; None while it opens no port."""
        return self._kv_address

    @property
    def room(self) -> PageRoom:
        """Who holds which page."""
        return self._room

    async def start(self) -> None:
        """Load the engine, open the KV port. Raises EngineLost, ConfigError or InsecureBind; ``close`` is due then."""
        loop = asyncio.get_running_loop()
        self._codec_start = await loop.run_in_executor(
            self._executor, measure, self._model.layout, self._config.chunk_tokens, self._codecs
        )
        looking = loop.run_in_executor(self._executor, discover, ThisMachine(), self._config.place)
        self._info = (await self._keeper.start()).info
        self._machine = await looking
        self._rates.measured(self._info.prefill_tokens_per_s, self._info.decode_tokens_per_s)
        self._transports = self._endpoint.open_lanes(carriers(self._config, self._identity, self._machine))
        if self._tiers is not None:
            self._tiers.start()
        port = self._config.kv_port
        if port is not None:
            bound = await self._listen(port)
            self._kv_address = port.advertise or KvAddress(port.host, bound)
        if self._config.kv_events is not None:
            topic = f"kv@{self._config.node_id}@{self._config.model_name}"
            self._event_socket = EventSocket(self._config.kv_events, topic, self._events)

    async def _listen(self, port: KvPort) -> int:
        try:
            return await self._endpoint.listen(port.host, port.port, self._listen_tls)
        except (OSError, UnicodeError) as error:  # the latter for a host that cannot be a name
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"--kv-host {port.host} --kv-port {port.port}: cannot listen there: {why}") from error

    async def run(self, stop: asyncio.Event, drain_s: float = 2.0) -> None:
        """Serve the gateways until ``stop``, then finish what can be finished in ``drain_s``. Raises NodeRefused."""
        works = [self._gateways.run(), self._keeper.run(), self._wait(stop)]
        if self._event_socket is not None:
            works.append(self._event_socket.run())
        if self._renewal is not None:
            works.append(self._renewal.run())
        if self._kv_certificate is not None:
            works.append(self._kv_certificate.follow(certificate_told))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
            await self._drain(drain_s)
        except CredentialsRefused:
            if self._renewal is not None:
                self._renewal.refused()
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def reload_certificate(self) -> None:
        """Take the KV port's certificate anew, without waiting for its files to be seen to change."""
        if self._kv_certificate is None:
            log.info("nothing to reload: no --kv-tls-cert")
            return
        try:
            self._kv_certificate.load()
        except OSError as error:
            certificate_told(error)
        else:
            certificate_told(None)

    async def joined(self) -> None:
        """Return once a gateway has accepted this node for the first time."""
        await self._welcomed.wait()

    async def close(self) -> None:
        """End every job, connection, process and mapping, in this order. Idempotent."""
        self._role.cancel()
        self._feeds.close()
        await self._serving.close()
        await self._asking.close()
        await self._auditor.close()
        await self._endpoint.close()
        await self._keeper.close()
        if self._event_socket is not None:
            self._event_socket.close()
        if self._tiers is not None:
            await self._tiers.close(self._config.tiers.keep)
        self._executor.shutdown()
        await asyncio.to_thread(self._tracer.close)
        self._pool.close()

    # ---- what the control streams ask

    def join(self) -> Join:
        """Who this node is and what it serves."""
        assert self._info is not None
        model = ModelInfo(
            self._config.model_name,
            self._model.fingerprint.parts(),
            self._info.context_tokens,
            self._info.chunk_tokens,
            self._info.vocab_size,
        )
        return Join(
            self._identity.node_id,
            self._identity.incarnation,
            self._config.cluster,
            self._role.role,
            self._identity.public_key,
            self._kv_address,
            model,
            _version(),
            self._config.max_queue,
            self._codec_start,
            _encoders(self._config.threads),
            probes=True,
            kv_events=True,
            converts=True,
            audits=True,
            role_epoch=self._role.epoch,
            max_running=self._config.max_running,
            topology=encode_report(self._machine),
            transports=self._transports,
            moves=self._config.prefix_cache,
            max_answers=_most_answers(self._config),
        )

    def heartbeat(self, gateway: str) -> Heartbeat:
        """Load, room, rates and links as they are now. What the cache could let go of is free."""
        pool, cache = self._room.pool, self._cache.figures
        jobs, tokens = (
            sum(both) for both in zip(self._serving.at_hand(gateway), self._asking.at_hand(gateway), strict=True)
        )
        return Heartbeat(
            accepting=self._accepting,
            queued_jobs=self._serving.queued_jobs + self._asking.queued_jobs,
            queued_tokens=self._serving.queued_tokens + self._asking.queued_tokens,
            running=self._serving.running + self._asking.running,
            pages_total=pool.capacity,
            pages_free=pool.free_pages + cache.pages - cache.pinned_pages,
            prefill_tokens_per_s=self._rates.prefill,
            decode_tokens_per_s=self._rates.decode,
            open_transfers=self._serving.open_transfers + self._asking.open_transfers,
            detail=self._detail,
            links=self._endpoint.links(),
            codecs=self._meter.totals(),
            pages_cached=cache.pages,
            cache_hits=cache.hits,
            cache_hit_tokens=cache.hit_tokens,
            pages_evicted=cache.evicted_pages,
            tiers=() if self._tiers is None else self._tiers.reports,
            engine=engine.figures if isinstance(engine := self._keeper.engine, TellsFigures) else None,
            others_jobs=jobs,
            others_tokens=tokens,
            role=self._role.role,
            role_epoch=self._role.epoch,
            tickets=self._serving.tickets,
            refused_tickets=self._serving.refused_tickets,
            tasks=len(asyncio.all_tasks()),
            files=len(os.listdir("/proc/self/fd")) - 1,  # but for the one that lists them
        )

    def on_welcome(self, gateway: str, welcome: Welcome) -> None:
        """Trust this gateway's tickets, for its own jobs."""

        def report(message: FromNode) -> None:
            self._report(gateway, message)

        self._serving.trust(welcome.ticket_key, gateway, report)
        self._asking.trust(welcome.ticket_key, gateway, report)
        self._welcomed.set()
        incarnation = self._identity.incarnation
        log.info("joined gateway url=%s cluster=%s incarnation=%s", gateway, self._config.cluster, incarnation)

    def on_order(self, gateway: str, order: Order) -> None:
        """Do what a gateway says."""
        match order:
            case Cancel(job=job):
                if not self._serving.cancel(job) and not self._asking.cancel(job):
                    self._report(gateway, Cancelled(job))
            case Drain():
                self._draining = True
                self._beat()
            case ChangeRole():
                self._role.order(order, gateway)
            case RateLease(egress_bytes_per_s=rate):
                self._endpoint.pace(rate)
            case CertificateIssued():
                if self._renewal is not None:
                    self._renewal.issued(order)
            case ReplayKvEvents(start_seq=start_seq):
                self._feeds.replay(gateway, start_seq)
            case ProbeLink(peer_node=peer, nbytes=nbytes):
                self._endpoint.probe(peer, nbytes, self._beat)
            case AuditKv():
                self._auditor.audit(order, lambda told: self._report(gateway, told))
            case PrefillJob(ticket=ticket, priority=rank) if not self._refusing:
                here = self._prefill_ranks.of(gateway, (claimed_transfer(ticket) or b"").hex(), rank)
                self._serving.accept(msgspec.structs.replace(order, priority=here), gateway)
                self._gateways.beat_soon()
            case SharePrefix() if not self._refusing:
                self._serving.accept(order, gateway)
            case GenerateJob(generation=generation, priority=rank) if not self._refusing:
                here = self._speech_ranks.of(gateway, generation, rank)
                self._asking.accept(msgspec.structs.replace(order, priority=here), gateway)
                self._gateways.beat_soon()
            case TakePrefix() if not self._refusing:
                self._asking.take(order, gateway)
            case PrefillJob(ticket=ticket) | SharePrefix(ticket=ticket) | TakePrefix(source=KvSource(ticket=ticket)):
                job = (claimed_transfer(ticket) or b"").hex()
                self._report(gateway, Failed(job, "queue", self._leaving, "takes no new jobs"))
            case GenerateJob(generation=generation):
                self._report(gateway, Failed(generation, "queue", self._leaving, "takes no new jobs"))

    def on_disconnected(self, gateway: str, cause: str) -> None:
        """Without its gateway no job has anybody to answer to; those of other gateways go on."""
        self._feeds.stop(gateway)
        self._role.lost(gateway)
        self._prefill_ranks.left(gateway)
        self._speech_ranks.left(gateway)
        self._serving.leave(gateway, "gateway_lost", cause)
        self._asking.leave(gateway, "gateway_lost", cause)
        self._gateways.beat_soon()

    # ---- inside

    @property
    def _accepting(self) -> bool:
        return self._keeper.engine is not None and not self._leaving

    @property
    def _leaving(self) -> str:
        """Why no new job should be sent: draining, converting; "" where jobs are welcome."""
        return "draining" if self._draining else "converting" if self._role.changing else ""

    @property
    def _refusing(self) -> bool:
        """Whether no new job is taken; gateways that could not have known yet are not refused."""
        return self._draining or self._role.refusing

    @property
    def _detail(self) -> str:
        """What keeps this node itself from taking or beginning work; "" where nothing does."""
        if self._leaving:
            return self._leaving
        waiting = self._room.waiting
        full = f"pool full: {waiting} {'transfer waits' if waiting == 1 else 'transfers wait'} for pages"
        return self._keeper.detail or (full if waiting else "")

    def _renewing(self, identity: Enrolled, dial_tls: ssl.SSLContext | None) -> Renewal:
        """Keeps the certificate, and shows it wherever it was shown first."""
        files = identity.enrolment.files
        assert files.cert is not None
        assert files.key is not None
        peers = [] if self._config.kv_tls.complete else [self._listen_tls, dial_tls]
        trusting = peers if self._config.gateway_ca is not None else [self._gateway_tls, *peers]
        shown = [each for each in (self._gateway_tls, *peers) if each is not None]
        return Renewal(
            identity.enrolment,
            identity.certificate,
            CertificateFiles(files.cert, files.key, shown, files.ca, [each for each in trusting if each is not None]),
            lambda asked: self._gateways.send_all(asked),
            identity.anew,
        )

    def _dial(self, url: str, handler: ControlHandler) -> ControlStream:
        token = self._config.join_token if self._renewal is None else None  # the certificate says it all
        return ControlStream(url, handler, join_token=token, tls=self._gateway_tls)

    def _beat(self) -> None:
        self._gateways.beat_now()

    def _report(self, gateway: str, message: FromNode) -> None:
        self._rates.observe(message)
        self._gateways.send(gateway, message)
        match message:
            case PrefillStarted(transfer=transfer):
                self._prefill_ranks.began(transfer.hex())
            case Delta(generation=generation):
                self._speech_ranks.began(generation)
            case Finished(generation=job) | Failed(job=job) | Cancelled(job=job):
                self._prefill_ranks.ended(job)
                self._speech_ranks.ended(job)
                self._gateways.beat_soon()

    def _answer(self, gateway: str, message: RoleChanged) -> None:
        self._gateways.send(gateway, message)

    async def _noticed(self) -> None:
        if len(self._gateways.joined) > 1:
            await asyncio.sleep(NOTICE_S)

    async def _wait(self, stop: asyncio.Event) -> None:
        await stop.wait()

    async def _drain(self, drain_s: float) -> None:
        self._draining = True
        self._beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._settled()
        await self._serving.close()
        await self._asking.close()
        await self._gateways.flush(0.5)

    async def _settled(self) -> None:
        """Return when no job is at hand on either side."""
        await self._serving.settled()
        await self._asking.settled()

    def _service_context(self) -> ServiceContext:
        return ServiceContext(
            node_id=self._identity.node_id,
            incarnation=self._identity.incarnation,
            fingerprint=self._fingerprint,
            chunk_tokens=self._config.chunk_tokens,
            geometry=self._geometry,
            pool=self._pool,
            room=self._room,
            engine=lambda: self._keeper.engine,
            executor=self._executor,
            endpoint=lambda: self._endpoint,
            report=self._rates.observe,
            transforms=self._model.transforms,
            tracer=self._tracer,
            limits=ServiceLimits(max_queue=self._config.max_queue),
            checkpoints=self._config.checkpoints,
            meter=self._meter,
            tiers=self._tiers,
        )

    def _client_context(self) -> ClientContext:
        return ClientContext(
            node_id=self._identity.node_id,
            public_key=self._identity.public_key,
            fingerprint=self._fingerprint,
            chunk_tokens=self._config.chunk_tokens,
            geometry=self._geometry,
            pool=self._pool,
            room=self._room,
            engine=lambda: self._keeper.engine,
            executor=self._executor,
            endpoint=lambda: self._endpoint,
            report=self._rates.observe,
            tokenizer=self._model.tokenizer,
            transforms=self._model.transforms,
            tracer=self._tracer,
            limits=ClientLimits(self._config.max_queue + self._config.max_running, _most_answers(self._config)),
            checkpoints=self._config.checkpoints,
            meter=self._meter,
            tiers=self._tiers,
        )


def embedded_engine(config: NodeConfig, on_loading: Callable[[Loading], None]) -> StartEngine:
    """Starts embedded engines for this configuration."""
    spec = EngineSpec(
        model_dir=config.model_dir,
        dtype=config.dtype,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=config.chunk_tokens,
        threads=config.threads,
        max_running=config.max_running,
        max_queue=config.max_queue,
    )

    async def start(pool: HostPool) -> Engine:
        return await EngineProcess.start(spec, pool, on_loading)

    return start


def _most_answers(config: NodeConfig) -> int:
    """To one prompt: they run at once, over caches that are all kept."""
    return min(config.max_running, ClientLimits().max_answers)


def _encoders(engine_threads: int) -> int:
    """How many processors can encode one transfer at once, beside the engine."""
    spare = len(os.sched_getaffinity(0)) - engine_threads
    return max(1, min(CODEC_THREADS, ServiceLimits().batches_ahead, spare))


def _version() -> str:
    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "unknown"
