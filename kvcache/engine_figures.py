"""What a node's engine says of itself, where it says more than its node can see: for operators, not for decisions."""

from __future__ import annotations

import msgspec


class EngineFigures(msgspec.Struct, frozen=True):
    """Of an engine with a cache of its own. Gauges are as last seen; the others count since the engine started.

    ``kv_used`` is the share of its KV blocks that requests hold, ``cached_blocks`` how many blocks of full attention
    its prefix cache holds by its events, of which ``events_missed`` batches did not come. Of ``prefix_queries`` tokens
    ``prefix_hits`` were in that cache.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    cached_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    load_failures: int = 0
    events_missed: int = 0
