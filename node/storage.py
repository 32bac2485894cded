"""What a node keeps KV in: the pool's pages and who holds them, the prefix cache over them, the tiers below."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcache.blocks import BLOCK_TOKENS, PageGeometry, PagePool
from kvcache.hostpool import HostPool
from kvcache.kept import recomputation
from kvcache.layout import GroupKind
from kvcache.prefix_cache import PrefixCache
from kvcache.room import PageRoom
from kvcache.tiers.hierarchy import Tiers
from node.config import NodeConfig, pool_pages
from node.event_log import EventLog
from node.model import NodeModel
from node.tiers import make_levels


class Storage:
    """Takes the pool's memory when it is made; ``close`` gives it back."""

    def __init__(self, config: NodeConfig, model: NodeModel, prefill_tokens_per_s: Callable[[], float]) -> None:
        """``prefill_tokens_per_s`` prices what would be computed again. Raises ConfigError for a pool or tiers that
        cannot be.
        """
        self._config = config
        self.geometry = PageGeometry.of(model.layout, BLOCK_TOKENS)
        page_bytes = self.geometry.page_bytes
        pages = pool_pages(config.pool_bytes, page_bytes)
        self.pool = HostPool.create(page_bytes, pages)
        kinds = {group.kind for group in model.layout.groups}
        self.events = EventLog(BLOCK_TOKENS, "mamba" if GroupKind.STATE in kinds else "sliding_window")
        page_pool, snapshots = PagePool(pages), kinds != {GroupKind.FULL}
        levels = make_levels(config.tiers, page_bytes)
        self.tiers = Tiers(levels, page_bytes, self.events, prefill_tokens_per_s) if levels else None
        self.cache = PrefixCache(
            page_pool,
            BLOCK_TOKENS,
            snapshots=snapshots,
            value=recomputation if self.tiers is None else self.tiers.costs.value,
            listener=self.events if self.tiers is None else self.tiers.telling,
        )
        waiting = config.max_queue + config.max_running
        self.room = PageRoom(page_pool, waiting, self.cache if config.prefix_cache else None)
        if self.tiers is not None:
            self.events.tiers = self.tiers
            fingerprint = model.fingerprint.digest()
            self.tiers.attach(self.cache, self.room, self.pool, fingerprint, time.monotonic, snapshots=snapshots)

    def start(self) -> None:
        """Have the tiers take over what an earlier process left."""
        if self.tiers is not None:
            self.tiers.start()

    async def close(self) -> None:
        """Let go of the tiers, then of the memory. Nothing may use a page any more. Idempotent."""
        if self.tiers is not None:
            await self.tiers.close(self._config.tiers.keep)
        self.pool.close()
