"""Where on its way a prefill should leave something to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Snapshots at every multiple of ``interval`` tokens, 0 for none, and at the last block boundary of the prompt.

    A snapshot takes as many pages as a whole window in every layer: their interval decides a hybrid cache's size.
    """

    interval: int = 2048

    def positions(self, start: int, stop: int, block_tokens: int) -> Iterator[int]:
        """Block-aligned positions in (start, stop], in order."""
        last = stop // block_tokens * block_tokens
        if self.interval:
            yield from range((start // self.interval + 1) * self.interval, last, self.interval)
        if last > start:
            yield last
