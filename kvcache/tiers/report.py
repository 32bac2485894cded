"""What a node says of its tiers in every heartbeat."""

from __future__ import annotations

import msgspec


class TierReport(msgspec.Struct, frozen=True):
    """One tier. ``state`` is "" where it works, else what keeps it from that, or what it is a model of.

    ``medium`` is how KV events call it. Since the node started it took ``spills`` entries of ``spilled_bytes`` in and
    gave ``reloads`` of ``reloaded_bytes`` back; in ``hits`` of them a job got all that it wanted, which spared it
    ``hit_tokens``. It let go of ``drops`` for want of room, and found ``damaged`` ones. ``read_bytes_per_s`` is 0 while
    nothing was read.
    """

    name: str
    medium: str
    state: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    entries: int = 0
    spills: int = 0
    spilled_bytes: int = 0
    reloads: int = 0
    reloaded_bytes: int = 0
    hits: int = 0
    hit_tokens: int = 0
    drops: int = 0
    damaged: int = 0
    read_bytes_per_s: float = 0.0
