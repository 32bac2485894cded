"""What a node says of itself: who it is when it joins a gateway, and how it does in every heartbeat."""

from __future__ import annotations

import asyncio
import logging
import os
from importlib.metadata import PackageNotFoundError, version

from decode_client.context import ClientLimits
from engines.protocol import EngineInfo, TellsFigures
from kvcache.codecs.meter import CodecMeter
from kvcache.control import CodecWork, Heartbeat, Join, KvAddress, ModelInfo
from kvcache.topology import MachineReport, encode_report
from kvcache.transport import KvEndpoint
from node.config import CODEC_THREADS, NodeConfig
from node.identity import Identity
from node.keeper import EngineKeeper
from node.model import NodeModel
from node.rates import Rates
from node.readiness import Readiness
from node.roles import NodeRole
from node.sides import Sides
from node.storage import Storage
from prefill_service.context import ServiceLimits

log = logging.getLogger(__name__)


class Presence:
    """Reads what the node's parts know; what turns out while it starts is set here, before anything joins."""

    def __init__(
        self,
        config: NodeConfig,
        model: NodeModel,
        identity: Identity,
        role: NodeRole,
        readiness: Readiness,
        storage: Storage,
        sides: Sides,
        keeper: EngineKeeper,
        rates: Rates,
        meter: CodecMeter,
        endpoint: KvEndpoint,
    ) -> None:
        self._config = config
        self._model = model
        self._identity = identity
        self._role = role
        self._readiness = readiness
        self._storage = storage
        self._sides = sides
        self._keeper = keeper
        self._rates = rates
        self._meter = meter
        self._endpoint = endpoint
        self.engine: EngineInfo | None = None
        self.codec_start: tuple[CodecWork, ...] = ()
        self.machine = MachineReport()
        self.kv_address: KvAddress | None = None
        self.transports: tuple[str, ...] = ()
        self._welcomed = asyncio.Event()

    def accepted(self, gateway: str) -> None:
        """A gateway has let this node in."""
        self._welcomed.set()
        incarnation = self._identity.incarnation
        log.info("joined gateway url=%s cluster=%s incarnation=%s", gateway, self._config.cluster, incarnation)

    async def joined(self) -> None:
        """Return once a gateway has accepted this node for the first time."""
        await self._welcomed.wait()

    def join(self) -> Join:
        """Who this node is and what it serves."""
        assert self.engine is not None
        model = ModelInfo(
            self._config.model_name,
            self._model.fingerprint.parts(),
            self.engine.context_tokens,
            self.engine.chunk_tokens,
            self.engine.vocab_size,
        )
        return Join(
            self._identity.node_id,
            self._identity.incarnation,
            self._config.cluster,
            self._role.role,
            self._identity.public_key,
            self.kv_address,
            model,
            _version(),
            self._config.max_queue,
            self.codec_start,
            _encoders(self._config.threads),
            probes=True,
            kv_events=True,
            converts=True,
            audits=True,
            role_epoch=self._role.epoch,
            max_running=self._config.max_running,
            topology=encode_report(self.machine),
            transports=self.transports,
            moves=self._config.prefix_cache,
            max_answers=most_answers(self._config),
        )

    def heartbeat(self, gateway: str) -> Heartbeat:
        """Load, room, rates and links as they are now. What the cache could let go of is free."""
        pool, cache, tiers = self._storage.room.pool, self._storage.cache.figures, self._storage.tiers
        jobs, tokens = self._sides.at_hand(gateway)
        return Heartbeat(
            accepting=self._readiness.accepting,
            queued_jobs=self._sides.queued_jobs,
            queued_tokens=self._sides.queued_tokens,
            running=self._sides.running,
            pages_total=pool.capacity,
            pages_free=pool.free_pages + cache.pages - cache.pinned_pages,
            prefill_tokens_per_s=self._rates.prefill,
            decode_tokens_per_s=self._rates.decode,
            open_transfers=self._sides.open_transfers,
            detail=self._readiness.detail,
            links=self._endpoint.links(),
            codecs=self._meter.totals(),
            pages_cached=cache.pages,
            cache_hits=cache.hits,
            cache_hit_tokens=cache.hit_tokens,
            pages_evicted=cache.evicted_pages,
            tiers=() if tiers is None else tiers.reports,
            engine=engine.figures if isinstance(engine := self._keeper.engine, TellsFigures) else None,
            others_jobs=jobs,
            others_tokens=tokens,
            role=self._role.role,
            role_epoch=self._role.epoch,
            tickets=self._sides.serving.tickets,
            refused_tickets=self._sides.serving.refused_tickets,
            tasks=len(asyncio.all_tasks()),
            files=len(os.listdir("/proc/self/fd")) - 1,  # but for the one that lists them
        )


def most_answers(config: NodeConfig) -> int:
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
