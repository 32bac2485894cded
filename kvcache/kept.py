"""What a prefix cache keeps, what is known of it, and who is told.

A *block* is the pages of ``block_tokens`` tokens in every layer of the FULL groups: any prompt with the same tokens up
to its end can use it. A *snapshot* is the windows and states at one block boundary: it can be used at exactly that
position, and only together with all blocks before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvcache.quality import Quality


class EntryKind(StrEnum):
    """The two kinds of what is kept."""

    BLOCK = "block"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where kept bytes come from.

    ``quality`` is the strictest level that may use them. ``codecs`` are the sets of codecs that they went through, the
    latest last; ``origin`` is the node that computed them.
    """

    quality: Quality = Quality.EXACT
    codecs: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block as a listener is told of it. ``parent`` is None for the first of a chain.

    An index that does not know of qualities should take only the EXACT ones: every request may use those.
    """

    hash: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    salt: str
    lora: str
    quality: Quality


class CacheListener(Protocol):
    """Is told of every change, in order, from inside the change: it must return at once and not call the cache."""

    def stored(self, blocks: Sequence[StoredBlock]) -> None:
        """Blocks can be used from now on, parents first.

        A block that is there already is told again when better bytes have replaced the old ones.
        """

    def snapshot(self, hash: bytes, quality: Quality) -> None:
        """Windows and states at the end of block ``hash`` can be used from now on."""

    def removed(self, hashes: Sequence[bytes], kind: EntryKind) -> None:
        """These blocks, or the snapshots at their ends, are gone; children before their parents."""


Value = Callable[[EntryKind, int, int, bool], float]
"""(kind, tokens, pages, copied) to what it costs to lose an entry, for each page that it takes.

Without it ``tokens`` would have to be computed again; where it is ``copied`` to a tier below, read back instead.
"""


def recomputation(kind: EntryKind, tokens: int, pages: int, copied: bool) -> float:
    """Tokens to be computed again, where there is no tier below."""
    return tokens / pages


@dataclass(eq=False, slots=True)
class Entry:
    """``pins`` hold it firmly, ``soft`` ones until its room is needed. ``copied``: a tier below has the same bytes.

    ``floor``, ``value`` and ``stamp`` are the eviction queue's.
    """

    kind: EntryKind
    tokens: int
    pages: tuple[int, ...]
    provenance: Provenance
    pins: int = 0
    soft: int = 0
    copied: bool = False
    floor: float = 0.0
    value: float = 0.0
    stamp: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Block(Entry):
    """One block; ``index`` counts from the start of its chain."""

    hash: bytes
    parent: Block | None
    index: int
    ids: array[int]
    salt: str
    lora: str
    children: int = 0
    snapshot: Snapshot | None = None

    def told(self) -> StoredBlock:
        """As a listener is told of it."""
        parent = None if self.parent is None else self.parent.hash
        return StoredBlock(self.hash, parent, tuple(self.ids), self.salt, self.lora, self.provenance.quality)


@dataclass(eq=False, slots=True, kw_only=True)
class Snapshot(Entry):
    """Windows and states at the end of ``block``."""

    block: Block
