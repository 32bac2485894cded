"""What the engine tests share: prompts, a pool with its bookkeeping, and whole jobs in one call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.process import EngineProcess
from engines.protocol import (
    Exported,
    GenerateCommand,
    GenerationFinished,
    JobEvent,
    Loaded,
    PrefillCommand,
    PrefillFinished,
    Token,
)
from engines.spec import EngineSpec
from kvcache.blocks import PageGeometry, PagePool, PageTable
from kvcache.control import Sampling, TokenLogprob
from kvcache.hostpool import HostPool
from kvcache.layout import DType, KVLayout
from kvcache.layout_configs import layout_from_config
from kvcache.plan import TransferPlan, plan_transfer
from tests.models import VOCAB

CHUNK = 256
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
GREEDY_LOGPROBS = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=-1)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ordinary token ids."""
    ids = torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * length + seed))
    return tuple(ids.tolist())


def layout_of(model_dir: Path, dtype: DType = DType.FLOAT32) -> KVLayout:
    """The layout that a model directory's config gives."""
    return layout_from_config(json.loads((model_dir / "config.json").read_text()), dtype)


@dataclass
class Room:
    """A host pool and who owns its pages."""

    geometry: PageGeometry
    pool: HostPool
    owners: PagePool

    @classmethod
    def create(cls, layout: KVLayout, pages: int = 2000, block_tokens: int = 64) -> Room:
        geometry = PageGeometry.of(layout, block_tokens)
        return cls(geometry, HostPool.create(geometry.page_bytes, pages), PagePool(pages))

    def table(self, owner: str, stop: int, start: int = 0) -> PageTable:
        pages = self.owners.allocate(owner, self.geometry.pages_for(start, stop))
        return self.geometry.table(start, stop, pages)

    def plan(self, stop: int, start: int = 0, chunk_tokens: int = CHUNK) -> TransferPlan:
        return plan_transfer(self.geometry.layout, start, stop, chunk_tokens)

    def pieces(self, table: PageTable, plan: TransferPlan) -> list[bytes]:
        """The bytes of every piece, in plan order."""
        return [b"".join(self.pool.views(table.extents(piece))) for piece in plan.pieces]

    def fill(self, table: PageTable, plan: TransferPlan, pieces: list[bytes]) -> None:
        """What a transfer does: put every piece at its place."""
        for piece, data in zip(plan.pieces, pieces, strict=True):
            at = 0
            for view in self.pool.views(table.extents(piece)):
                view[:] = data[at : at + len(view)]
                at += len(view)


@dataclass
class Spoken:
    """One finished generation."""

    tokens: list[int]
    logprobs: list[tuple[TokenLogprob, ...] | None]
    reason: str
    loaded: bool

    def vector(self, step: int) -> torch.Tensor:
        """Log-probabilities of the whole vocabulary before token ``step``."""
        found = self.logprobs[step]
        assert found is not None
        out = torch.full((VOCAB,), float("nan"))
        for entry in found[1:]:
            out[entry.token_id] = entry.logprob
        assert not out.isnan().any(), "logprobs=-1 covers the vocabulary"
        return out


async def prefill(engine: EngineProcess, job: str, ids: tuple[int, ...], table: PageTable) -> list[JobEvent]:
    """Compute and export ``table``'s range; returns all events."""
    command = PrefillCommand(job, ids, table.start, table.stop, table.pages)
    events = [event async for event in engine.submit(command)]
    assert isinstance(events[-1], PrefillFinished), events[-1]
    assert all(isinstance(event, Exported) for event in events[:-1])
    return events


async def generate(
    engine: EngineProcess, job: str, ids: tuple[int, ...], sampling: Sampling, table: PageTable | None = None
) -> Spoken:
    """Speak after ``ids`` from the KV in ``table``, or prefilled in place."""
    loaded, pages = (table.stop, table.pages) if table else (0, ())
    spoken = Spoken([], [], "", False)
    async for event in engine.submit(GenerateCommand(job, ids, loaded, pages, sampling)):
        if isinstance(event, Token):
            spoken.tokens.append(event.token_id)
            spoken.logprobs.append(event.logprobs)
        elif isinstance(event, Loaded):
            assert not spoken.tokens, "pages are given back before the first token"
            spoken.loaded = True
        else:
            assert isinstance(event, GenerationFinished), event
            spoken.reason = event.reason
    return spoken


@asynccontextmanager
async def running(model_dir: Path, room: Room, **options: object) -> AsyncIterator[EngineProcess]:
    """An engine that is closed at the end."""
    spec = EngineSpec(model_dir, DType.FLOAT32, **options)  # type: ignore[arg-type]
    engine = await EngineProcess.start(spec, room.pool)
    try:
        yield engine
    finally:
        await engine.close()
