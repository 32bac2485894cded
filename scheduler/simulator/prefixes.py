"""What a node, or a store that nodes share, keeps of the prompts it has seen, by the names of their blocks.

The rules are those of the hybrid prefix cache: only full blocks, reusable by any prompt that begins with them; states
only from a snapshot at exactly that position, of which there is one every so many blocks and one at a prompt's end. The
least recently used goes first, a prompt's last blocks before its first. Names are numbers that a trace brings along.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """How large and how fine: ``capacity_bytes`` of blocks and snapshots, a snapshot every ``snapshot_blocks``.

    ``shared``: one store that every node reads and writes, at home and away, as one that is reached over RDMA would be.
    """

    block_tokens: int
    block_bytes: int
    snapshot_bytes: int = 0
    snapshot_blocks: int = 1
    capacity_bytes: float = inf
    shared: bool = True


class PrefixStore:
    """Blocks and snapshots, least recently used first. A block is kept under its number, a snapshot after it as ~it."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.used_bytes = 0
        self._kept: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int], stop: int) -> tuple[int, int]:
        """Tokens of a prompt that need not be computed here, and that need not be sent here, both up to ``stop``."""
        kept, limit = self._kept, stop // self.spec.block_tokens
        held = cached = 0
        for count, block in enumerate(blocks[:limit], start=1):
            if block not in kept:
                break
            held = count
            if not self.spec.snapshot_bytes or ~block in kept:
                cached = count
        for block in reversed(blocks[:held]):
            kept.move_to_end(block)
        if cached and self.spec.snapshot_bytes:
            kept.move_to_end(~blocks[cached - 1])
        return cached * self.spec.block_tokens, held * self.spec.block_tokens

    def keep(self, blocks: Sequence[int], stop: int, snapshots: bool = True) -> None:
        """Keep a prompt of which ``stop`` tokens are computed here; what was only sent here leaves no ``snapshots``."""
        full, every = blocks[: stop // self.spec.block_tokens], self.spec.snapshot_blocks
        for count in range(len(full), 0, -1):
            block = full[count - 1]
            if snapshots and self.spec.snapshot_bytes and (count == len(full) or count % every == 0):
                self._add(~block, self.spec.snapshot_bytes)
            self._add(block, self.spec.block_bytes)
        while self.used_bytes > self.spec.capacity_bytes:
            gone, _ = self._kept.popitem(last=False)
            self.used_bytes -= self.spec.snapshot_bytes if gone < 0 else self.spec.block_bytes

    def clear(self) -> None:
        """Forget everything, as a node does that is lost or changes its role."""
        self._kept.clear()
        self.used_bytes = 0

    def _add(self, name: int, nbytes: int) -> None:
        if name in self._kept:
            self._kept.move_to_end(name)
        else:
            self._kept[name] = None
            self.used_bytes += nbytes
