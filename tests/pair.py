"""Two nodes without processes: both services over the real transport, fake engines, and a gateway that is the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tokenizers import Tokenizer

from decode_client.client import DecodeClient
from decode_client.context import ClientContext, ClientLimits
from kvcache.blocks import PageGeometry, PagePool
from kvcache.control import (
    Cancelled,
    Delta,
    Failed,
    Finished,
    FromNode,
    GenerateJob,
    KvAddress,
    KvPeer,
    KvSource,
    PrefillJob,
    Sampling,
)
from kvcache.hostpool import HostPool
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.prefix_cache import PrefixCache
from kvcache.quality import Quality
from kvcache.room import PageRoom
from kvcache.ticket import Ticket, sign_ticket
from kvcache.tiers.hierarchy import Tiers
from kvcache.tiers.level import Level
from kvcache.transport import KvEndpoint, LocalIdentity, TransportLimits
from kvcache.transport.hostlane import HostCarrier
from kvcache.wire import Role
from node.router import FrameRouter
from prefill_service.context import ServiceContext, ServiceLimits
from prefill_service.service import PrefillService
from tests.fake_engine import FakeEngine
from tests.kvcache.tiered import Ear
from tests.models import write_tokenizer

CHUNK = 128
FINGERPRINT = "f" * 32

T = TypeVar("T", bound=FromNode)


def _tensors(*names: str, shape: tuple[int, ...] = (1, 4)) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, DType.FLOAT32, shape) for name in names)


LAYOUT = KVLayout(
    (
        GroupSpec(GroupKind.FULL, (LayerSpec(0, _tensors("k", "v")), LayerSpec(3, _tensors("k", "v")))),
        GroupSpec(GroupKind.SLIDING, (LayerSpec(1, _tensors("k", "v")),), window=96),
        GroupSpec(GroupKind.STATE, (LayerSpec(2, _tensors("conv", "recurrent", shape=(3, 500))),)),
    )
)
GEOMETRY = PageGeometry.of(LAYOUT)


@dataclass(frozen=True)
class Job:
    """Both legs of one attempt."""

    ticket: Ticket
    prefill: PrefillJob
    generate: GenerateJob

    @property
    def transfer(self) -> str:
        return self.ticket.transfer.hex()

    @property
    def generation(self) -> str:
        return self.generate.generation


class Side:
    """One node's two services, its endpoint, its pool and all it told the gateway."""

    def __init__(
        self,
        name: str,
        role: Role,
        pages: int,
        tokenizer: Tokenizer,
        transport: TransportLimits,
        lanes: bool = False,
        levels: Sequence[Level] = (),
        **limits: float,
    ) -> None:
        self.name = name
        self.incarnation = f"{name}-1"
        self.key = Ed25519PrivateKey.generate()
        self.public_key = self.key.public_key().public_bytes_raw()
        self.pool = HostPool.create(GEOMETRY.page_bytes, pages)
        self.pages = PagePool(pages)
        self.tiers = Tiers(levels, GEOMETRY.page_bytes, Ear(), lambda: 1.0) if levels else None
        listener = None if self.tiers is None else self.tiers.telling
        self.cache = PrefixCache(self.pages, GEOMETRY.block_tokens, snapshots=True, listener=listener)
        self.room = PageRoom(self.pages, cache=self.cache)
        if self.tiers is not None:
            self.tiers.attach(
                self.cache, self.room, self.pool, FINGERPRINT, time.monotonic, snapshots=True, safe_share=1.0
            )
            self.tiers.start()
        self.executor = ThreadPoolExecutor(2)
        self.engine = FakeEngine(GEOMETRY, self.pool, self.pages, CHUNK)
        self.engine_present = True
        self.reports: list[FromNode] = []
        self.port: int | None = None
        self._news = asyncio.Event()
        shared = {
            "fingerprint": FINGERPRINT,
            "chunk_tokens": CHUNK,
            "geometry": GEOMETRY,
            "pool": self.pool,
            "room": self.room,
            "engine": lambda: self.engine if self.engine_present else None,
            "executor": self.executor,
            "endpoint": lambda: self.endpoint,
            "report": self._report,
            "tiers": self.tiers,
        }
        own = {key: value for key, value in limits.items() if key in ServiceLimits.__dataclass_fields__}
        self.serving = PrefillService(
            ServiceContext(node_id=name, incarnation=self.incarnation, limits=ServiceLimits(**own), **shared)
        )
        own = {key: value for key, value in limits.items() if key in ClientLimits.__dataclass_fields__}
        self.asking = DecodeClient(
            ClientContext(
                node_id=name, public_key=self.public_key, tokenizer=tokenizer, limits=ClientLimits(**own), **shared
            )
        )
        identity = LocalIdentity(name, self.incarnation, self.key, FINGERPRINT, lambda: role)
        self.handler = FrameRouter(self.serving, self.asking)
        self.endpoint = KvEndpoint(identity, self.handler, limits=transport)
        self.transports = self.endpoint.open_lanes([HostCarrier(self.public_key)] if lanes else ())

    @property
    def address(self) -> KvAddress | None:
        return KvAddress("127.0.0.1", self.port) if self.port is not None else None

    def _report(self, message: FromNode) -> None:
        self.reports.append(message)
        self._news.set()

    def trust(self, key: bytes) -> None:
        self.serving.trust(key)
        self.asking.trust(key)

    async def until(self, condition: Callable[[], T | bool | None], within: float = 10.0) -> T:
        """Wait until ``condition`` is true; looks again after every report and every few milliseconds."""
        async with asyncio.timeout(within):
            while not (found := condition()):
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.005):
                        await self._news.wait()
        return found

    async def told(self, kind: type[T], job: str, within: float = 10.0) -> T:
        """The first message of this kind about ``job``."""

        def find() -> T | None:
            return next((m for m in self.reports if isinstance(m, kind) and _about(m) == job), None)

        return await self.until(find, within)

    async def ended(self, job: str, within: float = 10.0) -> Finished | Failed | Cancelled:
        """How the gateway was told that a job ended."""
        return await self.told(Finished | Failed | Cancelled, job, within)

    def text(self, generation: str) -> str:
        return "".join(m.text for m in self.reports if isinstance(m, Delta) and m.generation == generation)

    def check_idle(self, but: str | None = None) -> None:
        """Nothing is held or pinned, except by the test itself, and nothing went wrong unnoticed."""
        self.cache.check_integrity()
        assert self.cache.figures.pinned_pages == 0
        assert self.pages.owners.keys() <= {but}
        assert self.room.waiting == 0
        assert self.serving.open_transfers == self.asking.open_transfers == 0
        assert self.asking._generations == {}
        assert self.asking._scratch.held_bytes == 0
        assert self.engine.jobs == set()
        assert self.engine.faults == []

    async def close(self) -> None:
        await self.serving.close()
        await self.asking.close()
        await self.endpoint.close()
        await self.engine.close()
        if self.tiers is not None:
            await self.tiers.close(keep=False)
        self.executor.shutdown()
        self.pool.close()


class Pair:
    """A prefill node and a decode node that trust one gateway key."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill = prefill
        self.decode = decode
        self.gateway_key = Ed25519PrivateKey.generate()
        self._count = 0
        for side in (prefill, decode):
            side.trust(self.gateway_key.public_key().public_bytes_raw())

    def job(
        self,
        tokens: int = 300,
        *,
        seconds: float = 20.0,
        codec: str = "raw",
        quality: Quality = Quality.EXACT,
        stops: tuple[str, ...] = (),
        max_tokens: int = 16,
        priority: int = 0,
        transports: tuple[str, ...] = (),
        ticket_key: Ed25519PrivateKey | None = None,
        include_stop: bool = False,
        ids: Sequence[int] | None = None,
        answers: int = 1,
        seed: int | None = None,
        **changes: object,
    ) -> Job:
        """One attempt of ``ids``, or of a prompt that nobody else has; ``changes`` replace fields of the ticket."""
        self._count += 1
        now = time.time()
        ids = tuple(ids or ((self._count * 31 + n * 7) % 500 + 4 for n in range(tokens)))
        tokens = len(ids)
        fields = {
            "transfer": os.urandom(16),
            "request_id": f"r{self._count}",
            "attempt": 1,
            "prefill_node": self.prefill.name,
            "prefill_incarnation": self.prefill.incarnation,
            "decode_key": self.decode.public_key,
            "fingerprint": FINGERPRINT,
            "start": 0,
            "stop": tokens - 1,
            "chunk_tokens": CHUNK,
            "byte_cap": LAYOUT.s_kv(tokens - 1),
            "issued": now,
            "deadline": now + seconds,
        }
        ticket = Ticket(**(fields | changes))
        signed = sign_ticket(ticket, ticket_key or self.gateway_key)
        dial = None
        if self.prefill.address is None:
            assert self.decode.address is not None
            dial = KvPeer(self.decode.name, self.decode.incarnation, self.decode.public_key, self.decode.address)
        prefill = self.prefill
        source = KvSource(signed, prefill.name, prefill.incarnation, prefill.public_key, prefill.address, quality)
        sampling = Sampling(max_tokens, temperature=0.0, stop=stops, include_stop=include_stop, seed=seed)
        generate = GenerateJob(f"r{self._count}.1", ids, sampling, source, now + seconds, answers=answers)
        return Job(ticket, PrefillJob(signed, ids, codec, priority, dial, transports=transports), generate)

    def start(self, job: Job) -> None:
        """Give both legs to their nodes."""
        self.prefill.serving.accept(job.prefill)
        self.decode.asking.accept(job.generate)

    async def idle(self, within: float = 10.0) -> None:
        """Wait until both nodes hold nothing, and check that they do."""
        await self.idle_but(None, within)

    async def idle_but(self, owner: str | None, within: float = 10.0) -> None:
        """Wait until nobody but ``owner`` holds anything."""
        async with asyncio.timeout(within):
            for side in (self.prefill, self.decode):
                await side.serving.settled()
                await side.asking.settled()
        self.prefill.check_idle(owner)
        self.decode.check_idle(owner)


@contextlib.asynccontextmanager
async def pair(
    tokenizer: Tokenizer,
    *,
    prefill_pages: int = 64,
    decode_pages: int = 64,
    dial: str = "in",
    transport: TransportLimits | None = None,
    lanes: tuple[bool, bool] = (False, False),
    levels: tuple[Sequence[Level], Sequence[Level]] = ((), ()),
    **limits: float,
) -> AsyncIterator[Pair]:
    """Two nodes on the loopback, with ``lanes`` beside TCP and ``levels`` below their pools or without.

    Nothing of them may be left, not even a task.
    """
    before = asyncio.all_tasks()
    transport = transport or TransportLimits()
    prefill = Side("east", Role.PREFILL, prefill_pages, tokenizer, transport, lanes[0], levels[0], **limits)
    decode = Side("west", Role.DECODE, decode_pages, tokenizer, transport, lanes[1], levels[1], **limits)
    listening = prefill if dial == "in" else decode
    listening.port = await listening.endpoint.listen("127.0.0.1", 0)
    both = Pair(prefill, decode)
    try:
        yield both
        await both.idle()
    finally:
        await prefill.close()
        await decode.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


def _about(message: FromNode) -> str | None:
    """The job that a message names."""
    transfer = getattr(message, "transfer", None)
    return transfer.hex() if transfer is not None else getattr(message, "job", getattr(message, "generation", None))


def tiny_tokenizer(directory) -> Tokenizer:
    """The tokenizer of the tiny models, without a model."""
    write_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
