"""One process of the measurement: what a node holds, less its gateway and its model."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from decode_client.client import DecodeClient
from decode_client.context import ClientContext
from kvcache.blocks import BLOCK_TOKENS, PageGeometry, PagePool
from kvcache.control import FromNode
from kvcache.hostpool import HostPool
from kvcache.layout import KVLayout
from kvcache.room import PageRoom
from kvcache.transport import Carrier, FrameHandler, KvEndpoint, LocalIdentity, TransportLimits
from kvcache.transport.hostlane import HostCarrier
from kvcache.transport.nixl_lane import NixlCarrier, agent_name
from kvcache.transport.ucx import OVER_TCP
from kvcache.wire import Role
from node.bench.kv.recording import Recording
from node.bench.kv.replay import ReplayEngine
from node.config import CODEC_THREADS
from node.identity import Identity
from node.router import FrameRouter
from prefill_service.context import ServiceContext
from prefill_service.service import PrefillService


@dataclass(frozen=True, slots=True)
class Subject:
    """The cache that is moved: of the first ``tokens`` tokens of some model, as both sides must know it."""

    layout: KVLayout
    fingerprint: str
    tokens: int
    chunk_tokens: int

    @property
    def nbytes(self) -> int:
        """Raw bytes of the whole cache."""
        return self.layout.s_kv(self.tokens)

    @property
    def geometry(self) -> PageGeometry:
        """The pages of either side's pool."""
        return PageGeometry.of(self.layout, BLOCK_TOKENS)

    @property
    def pages(self) -> int:
        """Pages that the cache takes."""
        return self.geometry.pages_for(0, self.tokens)


class Party:
    """Pool, threads, engine, both services and an endpoint. ``ticket_key`` is the public key that tickets are under."""

    def __init__(
        self,
        role: Role,
        subject: Subject,
        ticket_key: bytes,
        report: Callable[[FromNode], None],
        *,
        transfers_at_once: int = 1,
        recording: Recording | None = None,
        frames: Callable[[PrefillService, DecodeClient], FrameHandler] = FrameRouter,
        dial_ssl: ssl.SSLContext | None = None,
        limits: TransportLimits | None = None,
        trusted_network: bool = False,
        nixl: bool = False,
    ) -> None:
        """With ``nixl`` KV can also go by NIXL over TCP. Raises NixlMissing."""
        self.identity = Identity.fresh(f"bench-{role.name.lower()}-{secrets.token_hex(4)}")
        geometry = subject.geometry
        self.pool = HostPool.create(geometry.page_bytes, subject.pages * transfers_at_once)
        self._executor = ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="kv-codec")
        room, engine = PageRoom(PagePool(self.pool.pages)), ReplayEngine(geometry, self.pool, recording)
        shared: dict[str, Any] = {
            "node_id": self.identity.node_id,
            "fingerprint": subject.fingerprint,
            "chunk_tokens": subject.chunk_tokens,
            "geometry": geometry,
            "pool": self.pool,
            "room": room,
            "engine": lambda: engine,
            "executor": self._executor,
            "endpoint": lambda: self.endpoint,
            "report": report,
        }
        self.serving = PrefillService(ServiceContext(incarnation=self.identity.incarnation, **shared))
        no_words = Tokenizer(WordLevel({"": 0}, unk_token=""))
        self.asking = DecodeClient(ClientContext(public_key=self.identity.public_key, tokenizer=no_words, **shared))
        self.serving.trust(ticket_key)
        self.asking.trust(ticket_key)
        me = LocalIdentity(
            self.identity.node_id, self.identity.incarnation, self.identity.key, subject.fingerprint, lambda: role
        )
        self.endpoint: KvEndpoint = KvEndpoint(
            me,
            frames(self.serving, self.asking),
            dial_ssl,
            limits,
            trusted_network=trusted_network,
        )
        carriers: list[Carrier] = [HostCarrier(self.identity.public_key)]
        if nixl:
            name = agent_name(self.identity.node_id, self.identity.incarnation)
            carriers.append(NixlCarrier("nixl", name, OVER_TCP))
        self.endpoint.open_lanes(carriers)

    async def close(self) -> None:
        """End every transfer and connection, then give the memory back."""
        await self.serving.close()
        await self.asking.close()
        await self.endpoint.close()
        self._executor.shutdown()
        self.pool.close()
