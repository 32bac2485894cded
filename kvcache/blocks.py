"""Pages of the host pool: where each piece of a cache lies, and who owns which page. No tensors, no memory, no I/O.

A page holds ``block_tokens`` tokens of one layer of one group, tensor after tensor, each at a fixed offset (K of 64
tokens, then V of 64 tokens), on the absolute block grid. States run on over as many pages as they need. All pages have
one size, that of the largest block, so the pool never fragments and room for a transfer is a plain count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from kvcache.layout import GroupKind, GroupSpec, KVLayout
from kvcache.plan import Piece

PAGE_ALIGNMENT = 4096
BLOCK_TOKENS = 64
"""Of our own nodes, and so of the names in an index of what they keep; engines may have blocks of any size."""


class PoolFull(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous stretch of one page."""

    page: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How a layout's tensors map onto pages of ``page_bytes``. Without ``ends``, windows and states have no place."""

    layout: KVLayout
    block_tokens: int
    page_bytes: int
    ends: bool = True

    @classmethod
    def of(cls, layout: KVLayout, block_tokens: int = BLOCK_TOKENS) -> PageGeometry:
        """The smallest page, in multiples of 4 KiB, that holds a block of every token group.

        A layout of states alone uses 64 KiB pages.
        """
        largest = max(
            (layer.nbytes * block_tokens for g in layout.groups if g.kind is not GroupKind.STATE for layer in g.layers),
            default=65536,
        )
        return cls(layout, block_tokens, -(-largest // PAGE_ALIGNMENT) * PAGE_ALIGNMENT)

    @property
    def blocks_only(self) -> PageGeometry:
        """The same without windows and states: for the blocks of full-attention layers alone."""
        return replace(self, ends=False)

    def pages_for(self, start: int, stop: int) -> int:
        """Pages that a transfer of tokens [start, stop) occupies."""
        return sum(self.layer_pages(g, n, start, stop) for g, n in self.layers())

    def table(self, start: int, stop: int, pages: Sequence[int]) -> PageTable:
        """Lay tokens [start, stop) over ``pages``, which must be exactly as many as ``pages_for`` says."""
        if len(pages) != self.pages_for(start, stop):
            raise ValueError(f"[{start}, {stop}) takes {self.pages_for(start, stop)} pages, got {len(pages)}")
        first: dict[tuple[int, int], int] = {}
        taken = 0
        for g, n in self.layers():
            first[g, n] = taken
            taken += self.layer_pages(g, n, start, stop)
        return PageTable(self, start, stop, tuple(pages), first)

    def layers(self) -> list[tuple[int, int]]:
        """(group, layer) of every layer in canonical order."""
        return [(g, n) for g, group in enumerate(self.layout.groups) for n in range(len(group.layers))]

    def layer_pages(self, g: int, n: int, start: int, stop: int) -> int:
        """Pages that a transfer of tokens [start, stop) occupies with one layer of one group."""
        group = self.layout.groups[g]
        if not self.ends and group.kind is not GroupKind.FULL:
            return 0
        if group.kind is GroupKind.STATE:
            return -(-group.layers[n].nbytes // self.page_bytes)
        return -(-stop // self.block_tokens) - self.first_block(group, start, stop)

    def first_block(self, group: GroupSpec, start: int, stop: int) -> int:
        """The first block, on the absolute grid, that a transfer of [start, stop) holds of a token group."""
        token = start if group.kind is GroupKind.FULL else group.first_token(stop)
        return token // self.block_tokens


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: from ``inside`` of its layer's page for block 0, or of its layer's first page.

    ``nbytes`` is a token's, or the whole state's.
    """

    state: bool
    page: int
    inside: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of one transfer, in canonical order, and the way from a piece to its bytes."""

    geometry: PageGeometry
    start: int
    stop: int
    pages: tuple[int, ...]
    _first: dict[tuple[int, int], int] = field(repr=False)
    _places: dict[tuple[int, int, int], _Place] = field(default_factory=dict, repr=False)

    def layer(self, g: int, n: int) -> tuple[int, ...]:
        """The pages of one layer of one group, in the order of its blocks."""
        first = self._first[g, n]
        return self.pages[first : first + self.geometry.layer_pages(g, n, self.start, self.stop)]

    def extents(self, piece: Piece) -> list[Extent]:
        """Where a piece's bytes lie, in canonical order."""
        key = piece.group, piece.layer, piece.tensor
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._place(piece)
        if place.state:
            return self._run(place.page, place.inside, place.nbytes)
        block = self.geometry.block_tokens
        found = []
        token = piece.start
        while token < piece.stop:
            end = min(piece.stop, (token // block + 1) * block)
            page = self.pages[place.page + token // block]
            found.append(Extent(page, place.inside + token % block * place.nbytes, (end - token) * place.nbytes))
            token = end
        return found

    def _place(self, piece: Piece) -> _Place:
        group = self.geometry.layout.groups[piece.group]
        tensors = group.layers[piece.layer].tensors
        base, before = self._first[piece.group, piece.layer], sum(t.nbytes for t in tensors[: piece.tensor])
        nbytes = tensors[piece.tensor].nbytes
        if group.kind is GroupKind.STATE:
            return _Place(True, base, before, nbytes)
        first = self.geometry.first_block(group, self.start, self.stop)
        return _Place(False, base - first, before * self.geometry.block_tokens, nbytes)

    def _run(self, base: int, begin: int, nbytes: int) -> list[Extent]:
        size = self.geometry.page_bytes
        found = []
        end = begin + nbytes
        while begin < end:
            here = min(end, (begin // size + 1) * size)
            found.append(Extent(self.pages[base + begin // size], begin % size, here - begin))
            begin = here
        return found


class PagePool:
    """Who owns which page. Every page is free, has one owner, or is kept by the cache.

    An owner frees all it holds at once; what it hands over to the cache before that stays.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool has at least one page, got {capacity}")
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._owned: dict[str, tuple[int, ...]] = {}
        self._kept: set[int] = set()

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns and the cache does not keep."""
        return len(self._free)

    @property
    def kept_pages(self) -> frozenset[int]:
        """Pages that the cache keeps."""
        return frozenset(self._kept)

    @property
    def owners(self) -> dict[str, int]:
        """Pages held, by owner."""
        return {owner: len(pages) for owner, pages in self._owned.items()}

    def allocate(self, owner: str, count: int) -> tuple[int, ...]:
        """Take ``count`` pages, all or none. Raises PoolFull; ValueError where the owner already holds pages."""
        if owner in self._owned:
            raise ValueError(f"{owner!r} already holds pages")
        if count > len(self._free):
            raise PoolFull(f"{count} pages asked for, {len(self._free)} of {self.capacity} free")
        pages = tuple(self._free.pop() for _ in range(count))
        self._owned[owner] = pages
        return pages

    def release(self, owner: str) -> int:
        """Give back all pages of an owner; 0 where it holds none, so that releasing twice is harmless.

        Whoever takes as many next gets the same ones in the same order: memory that was used just now is warm.
        """
        pages = self._owned.pop(owner, ())
        self._free.extend(reversed(pages))
        return len(pages)

    def keep(self, owner: str, pages: Collection[int]) -> None:
        """Hand pages of ``owner`` over to the cache. Raises ValueError for pages that are not all its own."""
        held = self._owned.get(owner, ())
        given = set(pages)
        if not given.issubset(held):
            raise ValueError(f"{owner!r} does not own all of {sorted(given)}")
        self._owned[owner] = tuple(page for page in held if page not in given)
        self._kept |= given

    def drop(self, pages: Collection[int]) -> None:
        """Free pages that the cache kept. Raises ValueError where it kept not all of them."""
        if not self._kept.issuperset(pages):
            raise ValueError(f"the cache does not keep all of {sorted(pages)}")
        self._kept.difference_update(pages)
        self._free.extend(pages)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free, owned or kept, and exactly once."""
        owned = [page for pages in self._owned.values() for page in pages]
        assert sorted([*self._free, *owned, *self._kept]) == list(range(self.capacity)), "pages lost or owned twice"
