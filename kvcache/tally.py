"""How many pages a prefix cache keeps, and how many of those can be had; and what it has been good for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.kept import Entry


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """``hits`` that spared their jobs ``hit_tokens``, and ``evicted_pages``, since the start; the others as of now."""

    pages: int
    pinned_pages: int
    hits: int
    hit_tokens: int
    evicted_pages: int


class Tally:
    """Told of every change of an entry, so that no question has to look at them all. Counts are pages."""

    def __init__(self) -> None:
        self.kept = 0
        self.firm = 0
        """Of entries that are pinned: nothing frees these."""
        self.leased = 0
        """Of entries that are pinned or held softly."""
        self.copied = 0
        """Of entries that a tier below has, too."""
        self._hits = 0
        self._hit_tokens = 0
        self._evicted = 0

    @property
    def figures(self) -> CacheFigures:
        """How the cache does."""
        return CacheFigures(self.kept, self.leased, self._hits, self._hit_tokens, self._evicted)

    def added(self, pages: int) -> None:
        """So many more are kept, or fewer where it is negative."""
        self.kept += pages

    def removed(self, entry: Entry) -> None:
        """An entry that nobody holds is gone."""
        self.kept -= len(entry.pages)
        self._evicted += len(entry.pages)

    def used(self, tokens: int) -> None:
        """Somebody was spared so many."""
        if tokens:
            self._hits += 1
            self._hit_tokens += tokens

    def pin(self, entry: Entry, firm: bool, by: int) -> None:
        """Change how often an entry is held."""
        size = len(entry.pages)
        self.firm -= size if entry.pins else 0
        self.leased -= size if entry.pins or entry.soft else 0
        if firm:
            entry.pins += by
        else:
            entry.soft += by
        self.firm += size if entry.pins else 0
        self.leased += size if entry.pins or entry.soft else 0

    def mark_copied(self, entry: Entry, copied: bool) -> None:
        """Change whether a tier below has it."""
        entry.copied = copied
        self.copied += len(entry.pages) if copied else -len(entry.pages)

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise AssertionError unless the counts are those of these entries."""
        found = list(entries)
        assert self.kept == sum(len(e.pages) for e in found), "kept pages miscounted"
        assert self.firm == sum(len(e.pages) for e in found if e.pins), "pinned pages miscounted"
        assert self.leased == sum(len(e.pages) for e in found if e.pins or e.soft), "leased pages miscounted"
        assert self.copied == sum(len(e.pages) for e in found if e.copied), "copied pages miscounted"
