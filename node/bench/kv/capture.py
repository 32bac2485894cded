"""The KV to serve: a real model's, computed once by the embedded engine and kept, or one made up."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.process import EngineProcess
from engines.protocol import EngineLost, Exported, JobFailed, Loading, PrefillCommand
from engines.spec import EngineSpec
from kvcache.blocks import PageGeometry, PageTable
from kvcache.fingerprint import layout_digest
from kvcache.hostpool import HostPool
from kvcache.layout import DType
from kvcache.plan import TransferPlan, plan_transfer
from kvcache.presets import dense_70b
from kvcache.wire import DIGEST_BYTES
from node.bench.captured import made_up
from node.bench.kv.recording import CHUNK_TOKENS, Recording, digest_of
from node.bench.texts import documents
from node.model import NodeModel

CAPTURED_TOKENS = 2048
MADE_UP_TOKENS = CHUNK_TOKENS
"""No less: bytes that repeat inside one piece would flatter every codec."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Offer:
    """KV to serve, where it is from (captured or synthetic), and the fingerprint to serve it under."""

    recording: Recording
    source: str
    fingerprint: str


def synthetic() -> Offer:
    """Made-up values in the layout of a dense model of 70B parameters."""
    captured = made_up(dense_70b(), MADE_UP_TOKENS, CHUNK_TOKENS)
    try:
        recording = Recording.of(captured.plan, captured.table, captured.pool)
    finally:
        captured.close()
    return Offer(recording, "synthetic", layout_digest(recording.layout))


async def captured(model_dir: Path, dtype: DType, say: Say) -> Offer:
    """The cache that a model computes for a text that every machine with Python has; kept for the next time.

    Raises ConfigError for a directory that holds no model, EngineLost for one that the engine does not run, OSError.
    """
    model = NodeModel.read(model_dir, dtype)
    fingerprint = model.fingerprint.digest()
    plan = plan_transfer(model.layout, 0, CAPTURED_TOKENS, CHUNK_TOKENS)
    geometry = PageGeometry.of(model.layout)
    pages = geometry.pages_for(0, CAPTURED_TOKENS)
    table = geometry.table(0, CAPTURED_TOKENS, range(pages))
    kept = cache_directory() / f"kv-{fingerprint}-{CAPTURED_TOKENS}.bin"
    pool = HostPool.create(geometry.page_bytes, pages)
    try:
        if not _load(kept, plan, table, pool):
            say(f"capturing the KV of {CAPTURED_TOKENS} tokens from {model_dir.name}, once")
            ids = model.tokenizer.encode(documents(2)[0]).ids[:CAPTURED_TOKENS]
            spec = EngineSpec(model_dir, dtype, chunk_tokens=CHUNK_TOKENS)
            await _compute(spec, pool, ids, table, len(plan.pieces), say)
            _store(kept, plan, table, pool)
        return Offer(Recording.of(plan, table, pool), "captured", fingerprint)
    finally:
        pool.close()


def cache_directory() -> Path:
    """Where captures are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prfaas"


async def _compute(spec: EngineSpec, pool: HostPool, ids: list[int], table: PageTable, pieces: int, say: Say) -> None:
    said = -1

    def progress(what: str, fraction: float) -> None:
        nonlocal said
        if int(fraction * 4) != said:
            said = int(fraction * 4)
            say(f"{what} {said * 25} %")

    def loading(event: Loading) -> None:
        progress(event.stage, event.fraction)

    engine = await EngineProcess.start(spec, pool, loading)
    try:
        async for event in engine.submit(PrefillCommand("capture", tuple(ids), 0, len(ids), table.pages)):
            match event:
                case Exported(next_seq=next_seq):
                    progress("computed", next_seq / pieces)
                case JobFailed(cause=cause, detail=detail):
                    raise EngineLost(f"{cause}: {detail}")
    finally:
        await engine.close()


def _load(path: Path, plan: TransferPlan, table: PageTable, pool: HostPool) -> bool:
    """Lay a kept capture into the pool; False where there is none, or a damaged one."""
    try:
        kept = memoryview(path.read_bytes())
    except FileNotFoundError:
        return False
    if len(kept) != plan.nbytes + DIGEST_BYTES:
        return False
    at = 0
    for piece in plan.pieces:
        for view in pool.views(table.extents(piece)):
            view[:] = kept[at : at + len(view)]
            at += len(view)
    return digest_of(plan, table, pool) == bytes(kept[at:])


def _store(path: Path, plan: TransferPlan, table: PageTable, pool: HostPool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in plan.pieces:
                file.writelines(pool.views(table.extents(piece)))
            file.write(digest_of(plan, table, pool))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
