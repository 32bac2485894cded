"""Page tables that lie partly in kept pages: what a cache and a transfer hand each other.

A cache keeps pages by block, one for every layer of the FULL groups; a table lists them by layer. Windows and states at
a block boundary are a table of no tokens there: its pages are those of a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.blocks import PageGeometry, PageTable
from kvcache.layout import GroupKind
from kvcache.lease import Lease


def fresh_pages(geometry: PageGeometry, start: int, stop: int, shared_blocks: int) -> int:
    """Pages that a table of [start, stop) takes beside those of its first ``shared_blocks`` blocks."""
    return geometry.pages_for(start, stop) - shared_blocks * len(_full_layers(geometry))


def compose(
    geometry: PageGeometry, start: int, stop: int, shared: Sequence[Sequence[int]], fresh: Sequence[int]
) -> PageTable:
    """The table of [start, stop) whose first blocks lie in ``shared`` pages, by block, and all else in ``fresh`` ones.

    Raises ValueError where ``start`` is no block boundary or ``fresh`` is not what ``fresh_pages`` says.
    """
    if shared and start % geometry.block_tokens:
        raise ValueError(f"start: {start} is no multiple of {geometry.block_tokens}, whole blocks are shared")
    wanted = fresh_pages(geometry, start, stop, len(shared))
    if len(fresh) != wanted:
        raise ValueError(f"[{start}, {stop}) takes {wanted} pages beside {len(shared)} blocks, got {len(fresh)}")
    left = iter(fresh)
    pages: list[int] = []
    full = 0
    for g, n in geometry.layers():
        count = geometry.layer_pages(g, n, start, stop)
        if geometry.layout.groups[g].kind is GroupKind.FULL:
            pages += [block[full] for block in shared]
            count -= len(shared)
            full += 1
        pages += [next(left) for _ in range(count)]
    return geometry.table(start, stop, pages)


def leased_table(geometry: PageGeometry, lease: Lease) -> PageTable:
    """The table of all that a lease with a snapshot holds."""
    return compose(geometry, 0, lease.tokens, lease.blocks, lease.snapshot)


def block_pages(table: PageTable, first: int, stop: int) -> list[tuple[int, ...]]:
    """The pages of each block in [first, stop), counted on the absolute grid, over the layers of the FULL groups."""
    offset = table.start // table.geometry.block_tokens
    layers = [table.layer(g, n)[first - offset : stop - offset] for g, n in _full_layers(table.geometry)]
    return list(zip(*layers, strict=True))


def end_pages(table: PageTable) -> tuple[int, ...]:
    """The pages of windows and states, which are those at the table's ``stop``."""
    full = set(_full_layers(table.geometry))
    return tuple(page for g, n in table.geometry.layers() if (g, n) not in full for page in table.layer(g, n))


def needs_snapshots(geometry: PageGeometry) -> bool:
    """Whether the model has windows or states."""
    return any(group.kind is not GroupKind.FULL for group in geometry.layout.groups)


def _full_layers(geometry: PageGeometry) -> list[tuple[int, int]]:
    return [(g, n) for g, n in geometry.layers() if geometry.layout.groups[g].kind is GroupKind.FULL]
