"""What one engine alone says: the yardstick that the whole stack is held against.

A fresh engine process with a pool of its own prefills the same tokens and speaks after them; nothing of the gateway,
the nodes or the wire is involved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.keeping import checkpoints
from engines.process import EngineProcess
from engines.protocol import (
    GenerateCommand,
    GenerationFinished,
    JobEvent,
    Offered,
    PrefillCommand,
    PrefillFinished,
    StoreCommand,
    Token,
)
from engines.spec import EngineSpec
from kvcache.blocks import BLOCK_TOKENS, PageGeometry
from kvcache.checkpoints import CheckpointPolicy
from kvcache.control import Sampling
from kvcache.digest import kv_digest, piece_digest
from kvcache.hostpool import HostPool
from kvcache.layout import DType
from kvcache.layout_configs import layout_from_config, read_config
from kvcache.plan import plan_transfer


@dataclass(frozen=True, slots=True)
class TransferRange:
    """What a decision record says of a transfer's extent: tokens [start, stop) on a grid of ``chunk_tokens``."""

    start: int
    stop: int
    chunk_tokens: int


class ReferenceFailed(Exception):
    """The reference engine could not do its part."""


class ReferenceEngine:
    """One engine process and a pool that holds one export at a time. Use as an async context manager."""

    def __init__(self, model_dir: Path, dtype: DType, longest: int, chunk_tokens: int) -> None:
        """``longest`` bounds the tokens of an export."""
        config = read_config(model_dir)
        self._spec = EngineSpec(model_dir, dtype, BLOCK_TOKENS, chunk_tokens, max_running=1, self_check=False)
        self._layout = layout_from_config(config, dtype)
        self._geometry = PageGeometry.of(self._layout, BLOCK_TOKENS)
        self._pool = HostPool.create(self._geometry.page_bytes, self._geometry.pages_for(0, longest))
        self._engine: EngineProcess | None = None
        self._jobs = 0

    async def __aenter__(self) -> ReferenceEngine:
        try:
            self._engine = await EngineProcess.start(self._spec, self._pool)
        except BaseException:
            self._pool.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._running.close()
        self._pool.close()

    @property
    def _running(self) -> EngineProcess:
        assert self._engine is not None, "enter the context first"
        return self._engine

    async def digest(self, token_ids: tuple[int, ...], extent: TransferRange) -> bytes:
        """Digest of the KV that a prefill of ``token_ids`` exports for ``extent``. Raises ReferenceFailed."""
        if extent.chunk_tokens != self._spec.chunk_tokens:
            raise ReferenceFailed(
                f"the record's grid is {extent.chunk_tokens}, the reference's {self._spec.chunk_tokens}"
            )
        pages = tuple(range(self._geometry.pages_for(extent.start, extent.stop)))
        table = self._geometry.table(extent.start, extent.stop, pages)
        ids = token_ids[: extent.stop]
        wanted = checkpoints(self._geometry, CheckpointPolicy(), 0, extent.start, extent.stop)
        command = PrefillCommand(self._job(), ids, extent.start, extent.stop, pages, checkpoints=wanted)
        async for event in self._running.submit(command):
            last = event
            self._decline(event)
        if not isinstance(last, PrefillFinished):
            raise ReferenceFailed(f"the reference prefill ended with {last}")
        plan = plan_transfer(self._layout, extent.start, extent.stop, extent.chunk_tokens)
        return kv_digest(b"".join(piece_digest(self._pool.views(table.extents(piece))) for piece in plan.pieces))

    async def speak(self, token_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The greedy continuation, end tokens ignored. Raises ReferenceFailed."""
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        said = []
        wanted = checkpoints(self._geometry, CheckpointPolicy(), 0, None, len(token_ids) - 1)
        command = GenerateCommand(self._job(), token_ids, 0, (), sampling, wanted)
        async for event in self._running.submit(command):
            last = event
            self._decline(event)
            if isinstance(event, Token):
                said.append(event.token_id)
        if not isinstance(last, GenerationFinished):
            raise ReferenceFailed(f"the reference generation ended with {last}")
        return tuple(said)

    def _decline(self, event: JobEvent) -> None:
        """Snapshots of states end chunks: they are asked for as nodes do, but not kept."""
        if isinstance(event, Offered):
            self._running.store(StoreCommand(event.job, event.stop, ()))

    def _job(self) -> str:
        self._jobs += 1
        return f"reference-{self._jobs}"
