"""What one generation takes from the prefix cache, and what it leaves there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from decode_client.context import ClientContext
from engines.keeping import JobKeeper, checkpoints
from engines.protocol import Checkpoint, Offered, Stored
from engines.running import EngineRun
from kvcache.blocks import PageTable
from kvcache.chain import TokenChain
from kvcache.codecs import CodecSet
from kvcache.control import GenerateJob
from kvcache.kept import Provenance
from kvcache.lease import Lease
from kvcache.prefix_cache import PrefixCache
from kvcache.quality import Quality
from kvcache.tables import compose, leased_table
from kvcache.tiers.hierarchy import brought

_LEVELS = tuple(Quality)


class Prefix:
    """The cached prefix of one prompt. Torch-free; all calls come from the event loop.

    First ``hold`` or ``resume``, where there is anything to hold; then ``fetched`` and ``loaded``, the offers, and in
    any case ``close``.
    """

    def __init__(self, context: ClientContext, order: GenerateJob, owner: str, chain: TokenChain) -> None:
        """``chain`` is that of the prompt without its last token, which the decode step runs."""
        assert context.room.cache is not None
        self._context = context
        self._quality = order.quality if order.source is None else order.source.quality
        self._owner = owner
        self._chain = chain
        self._cache: PrefixCache = context.room.cache
        self._lease: Lease | None = None
        self._keeper: JobKeeper | None = None
        self._behind = [order.token_ids[-1]]
        self._fetched: PageTable | None = None

    @property
    def lease(self) -> Lease | None:
        """What is held of the prompt."""
        return self._lease

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be prefilled in place."""
        return 0 if self._lease is None else self._lease.tokens

    @property
    def keep_from(self) -> int:
        """Where the blocks begin that only the answer fills."""
        block = self._context.geometry.block_tokens
        return len(self._chain.token_ids) // block * block

    def brought(self, tokens: int, deadline: float, *, resume: bool) -> AbstractAsyncContextManager[None]:
        """Within it, what tiers have of the first ``tokens`` is in the pool, as far as there is room to spare.

        To ``hold`` them all are needed; to ``resume``, what is cheaper to read than to compute.
        """
        tiers, needed = self._context.tiers, not resume
        return brought(tiers, self._chain, tokens, self._quality, deadline, resume=resume, needed=needed)

    def hold(self, tokens: int, revoked: Callable[[], None]) -> bool:
        """Hold the blocks below ``tokens`` softly; False where they are not all here."""
        self._lease = self._cache.lease(self._chain.hashes, tokens, self._quality, resume=False, revoked=revoked)
        if self._lease is not None:
            self._cache.used(self._lease)
        return self._lease is not None

    def resume(self) -> tuple[PageTable | None, tuple[Checkpoint, ...]]:
        """Hold what a prefill in place can go on from: its table, None without any, and what it should offer."""
        geometry, stop = self._context.geometry, len(self._chain.token_ids)
        found = self._cache.match(self._chain.hashes, self._quality).resumable
        lease = self._cache.lease(self._chain.hashes, found, self._quality, resume=True)
        assert lease is not None, "it was matched just now"
        self._lease = lease
        self._cache.used(lease)
        self._keeper = self._keep(lease, Provenance(lease.quality, origin=self._context.node_id))
        table = leased_table(geometry, lease) if found else None
        return table, checkpoints(geometry, self._context.checkpoints, found, None, stop)

    def fetched(self, pages: Sequence[int], codec: CodecSet, origin: str) -> PageTable:
        """The table of the whole prompt: what is held, and the fetched ``pages`` behind it."""
        lease = self._lease
        assert lease is not None
        self._fetched = compose(self._context.geometry, 0, len(self._chain.token_ids), lease.blocks, pages)
        needed = Quality.needed_for(codec.members) or Quality.COMPACT
        quality = max(needed, lease.quality, key=_LEVELS.index)
        self._keeper = self._keep(lease, Provenance(quality, (codec.name,), origin))
        return self._fetched

    def loaded(self) -> None:
        """The engine reads none of it any more: what was fetched stays as kept blocks, and nothing is held."""
        if self._keeper is not None and self._fetched is not None:
            self._keeper.keep_table(self._fetched, self._fetched.stop, done=True)
            self._fetched = None
            self._keeper.provenance = Provenance(self._keeper.provenance.quality, origin=self._context.node_id)
        self._release()

    def said(self, token_id: int) -> None:
        """A token of the answer."""
        self._behind.append(token_id)

    def offered(self, event: Offered, run: EngineRun) -> None:
        """The engine has something to keep."""
        assert self._keeper is not None
        if event.stop > len(self._keeper.chain.token_ids):
            self._keeper.chain = self._chain.extended(self._behind)
        self._keeper.offered(event, run)

    def stored(self, event: Stored) -> None:
        """What it offered is written, or not."""
        assert self._keeper is not None
        self._keeper.stored(event)

    def close(self) -> None:
        """Keep what can be kept and let go of all, once the engine has. Idempotent."""
        self.loaded()
        if self._keeper is not None:
            self._keeper.close()

    def _keep(self, lease: Lease, provenance: Provenance) -> JobKeeper:
        context = self._context
        return JobKeeper(context.room, context.geometry, self._owner, self._chain, lease, provenance)

    def _release(self) -> None:
        self._context.room.release(self._owner)
        if self._lease is not None:
            self._lease.release()
