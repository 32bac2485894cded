"""What a node was told of tiers below its pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """``nbytes`` of NUMA node ``numa``. ``note`` says what it is a model of, "" where it is what it should be."""

    nbytes: int
    numa: int
    note: str


@dataclass(frozen=True, slots=True)
class FileTier:
    """Files in ``directory``; ``keep``: over an orderly stop, too, and not only over a crash."""

    directory: Path
    nbytes: int
    keep: bool


@dataclass(frozen=True, slots=True)
class TierConfig:
    """None for a tier that nobody asked for."""

    memory: MemoryTier | None = None
    files: FileTier | None = None

    @property
    def keep(self) -> bool:
        """Whether what tiers hold outlives the node's process."""
        return self.files is not None and self.files.keep
