"""Computing again what other nodes sent, in pages that nobody needs now, and measuring how far the two are apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from decode_client.context import ClientContext
from engines.protocol import EngineLost, PrefillCommand, PrefillFinished
from engines.running import EngineRun
from kvcache.blocks import Extent, PageTable
from kvcache.chain import TokenChain
from kvcache.control.audits import AuditKv, KvAudited
from kvcache.kept import Block, EntryKind
from kvcache.layout import DType, GroupKind
from kvcache.lease import Lease
from kvcache.plan import plan_transfer
from kvcache.quality import Quality
from kvcache.threadwork import ThreadWork

log = logging.getLogger(__name__)

AUDIT_PRIORITY = 1 << 30
"""Behind everything else that the engine has to do."""
LONGEST_S = 60.0

_FLOATS: dict[DType, np.dtype[np.generic]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.BFLOAT16: np.dtype("<u2"),
}


class KvAuditor:
    """One audit at a time. All calls come from the event loop."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._running: asyncio.Task[None] | None = None

    def audit(self, order: AuditKv, report: Callable[[KvAudited], None]) -> None:
        """Begin; ``report`` is told what comes of it, and that soon where it cannot be done."""
        if self._running is not None:
            report(KvAudited(order.audit, cause="busy"))
            return
        self._running = asyncio.create_task(self._run(order, report))
        self._running.add_done_callback(self._over)

    async def close(self) -> None:
        """Give up what is running. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._running = None

    async def _run(self, order: AuditKv, report: Callable[[KvAudited], None]) -> None:
        try:
            async with asyncio.timeout(LONGEST_S):
                result = await self._audited(order)
        except TimeoutError:
            result = KvAudited(order.audit, cause="late")
        except EngineLost:
            result = KvAudited(order.audit, cause="engine_lost")
        except Exception as error:  # whoever asked waits for a word
            log.error("audit broke audit=%s", order.audit, exc_info=error)
            result = KvAudited(order.audit, cause="broken")
        report(result)

    async def _audited(self, order: AuditKv) -> KvAudited:
        context, cache = self._context, self._context.room.cache
        engine = context.engine()
        if cache is None or engine is None:
            return KvAudited(order.audit, cause="no_cache" if cache is None else "engine_lost")
        names = {"fingerprint": context.fingerprint, "salt": order.salt, "lora": order.lora}
        chain = TokenChain.of(order.token_ids, context.geometry.block_tokens, **names)
        count = len(list(_from(order.origin, [cache.entry(name, EntryKind.BLOCK) for name in chain.hashes])))
        tokens = count * context.geometry.block_tokens
        if not tokens:
            return KvAudited(order.audit, cause="gone")
        with contextlib.ExitStack() as held:
            given_up = asyncio.Event()
            lease = cache.lease(chain.hashes, tokens, Quality.EXACT, resume=False, revoked=given_up.set)
            if lease is None:
                return KvAudited(order.audit, cause="gone")
            held.callback(lease.release)
            owner = f"audit {order.audit}"
            pages = context.room.take_spare(owner, context.geometry.pages_for(0, tokens))
            if pages is None:
                return KvAudited(order.audit, cause="no_room")
            held.callback(context.room.release, owner)
            command = PrefillCommand(
                order.audit, order.token_ids[:tokens], 0, tokens, pages, AUDIT_PRIORITY, salt=order.salt
            )
            return await self._computed(EngineRun(engine, command, lambda event: None), command, lease, given_up)

    async def _computed(
        self, run: EngineRun, command: PrefillCommand, lease: Lease, given_up: asyncio.Event
    ) -> KvAudited:
        """Compare what the run makes with what is kept, unless others need its room before."""
        audit, tokens = command.job, command.stop
        work = ThreadWork(self._context.executor)
        try:
            if not isinstance(await _unless(given_up, run), PrefillFinished) or lease.gone:
                return KvAudited(audit, cause="no_room" if given_up.is_set() else "not_computed")
            table = self._context.geometry.table(0, tokens, command.pages)
            error = await work.start(self._compared, table, lease)
            # What was evicted meanwhile may have been read as somebody else's bytes.
            return KvAudited(audit, cause="no_room") if lease.gone else KvAudited(audit, tokens, error)
        finally:
            await run.stop(self._context.limits.engine_patience_s)
            await work.settle()

    def _compared(self, table: PageTable, lease: Lease) -> float:
        """The greatest relative error over the tensors of the FULL groups; in a thread."""
        geometry, pool = self._context.geometry, self._context.pool
        plan = plan_transfer(geometry.layout, 0, lease.tokens, lease.tokens)
        layers = [at for at in geometry.layers() if geometry.layout.groups[at[0]].kind is GroupKind.FULL]
        place = {at: n for n, at in enumerate(layers)}
        worst = 0.0
        for piece in (piece for piece in plan.pieces if (piece.group, piece.layer) in place):
            at = piece.group, piece.layer
            dtype = plan.tensor(piece).dtype
            off = size = 0.0
            for extent in table.extents(piece):
                block = table.layer(*at).index(extent.page)
                kept = lease.blocks[block][place[at]]
                here = pool.view(extent)
                there = pool.view(Extent(kept, extent.offset, extent.nbytes))
                ours, theirs = _floats(here, dtype), _floats(there, dtype)
                if here == there:
                    theirs = ours = np.nan_to_num(ours)
                with np.errstate(all="ignore"):  # made-up KV holds anything
                    off += float(np.square(theirs.astype(np.float64) - ours).sum())
                    size += float(np.square(ours.astype(np.float64)).sum())
            error = math.sqrt(off / size) if size else float(off > 0)
            worst = max(worst, error if math.isfinite(error) else math.inf)
        return worst


def _from(origin: str, entries: Sequence[object]) -> Iterator[Block]:
    """The blocks at the beginning that ``origin`` sent in exact codecs, until the first that is another's."""
    for entry in entries:
        exact = isinstance(entry, Block) and entry.provenance.quality is Quality.EXACT
        if not (isinstance(entry, Block) and exact and entry.provenance.origin == origin):
            return
        yield entry


def _floats(data: memoryview, dtype: DType) -> NDArray[np.float32]:
    """The numbers of a stretch of KV as fp32."""
    raw = np.frombuffer(data, dtype=_FLOATS[dtype])
    if dtype is DType.BFLOAT16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


async def _unless(given_up: asyncio.Event, run: EngineRun) -> object:
    """How the run ended; None where it was given up before."""
    ending, giving = asyncio.create_task(run.wait()), asyncio.create_task(given_up.wait())
    try:
        await asyncio.wait((ending, giving), return_when=asyncio.FIRST_COMPLETED)
        return ending.result() if ending.done() else None
    finally:
        for task in (ending, giving):
            task.cancel()
        with contextlib.suppress(EngineLost):
            await asyncio.gather(ending, giving, return_exceptions=True)
