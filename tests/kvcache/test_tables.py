"""Tables over kept and fresh pages: every piece lies where its block's owner says."""

from __future__ import annotations

import pytest

from kvcache.blocks import PageGeometry, PagePool
from kvcache.chain import TokenChain
from kvcache.kept import Provenance
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import plan_transfer
from kvcache.prefix_cache import PrefixCache
from kvcache.quality import Quality
from kvcache.tables import block_pages, compose, end_pages, fresh_pages, leased_table, needs_snapshots


def _tensors(*shape: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, DType.FLOAT32, shape) for name in "ab")


FULL = GroupSpec(GroupKind.FULL, (LayerSpec(0, _tensors(1, 4)), LayerSpec(3, _tensors(1, 4))))
LAYOUT = KVLayout(
    (
        FULL,
        GroupSpec(GroupKind.SLIDING, (LayerSpec(1, _tensors(1, 4)),), window=96),
        GroupSpec(GroupKind.STATE, (LayerSpec(2, _tensors(3, 500)),)),
    )
)
GEOMETRY = PageGeometry.of(LAYOUT)


def test_shared_blocks_are_found_in_every_full_layer_and_all_else_is_fresh() -> None:
    whole = GEOMETRY.table(0, 300, range(100, 100 + GEOMETRY.pages_for(0, 300)))
    shared = block_pages(whole, 1, 3)
    count = fresh_pages(GEOMETRY, 64, 300, 2)
    assert count == GEOMETRY.pages_for(64, 300) - 2 * 2
    mixed = compose(GEOMETRY, 64, 300, shared, range(count))
    for piece in plan_transfer(LAYOUT, 64, 300, 64).pieces:
        for extent, there in zip(mixed.extents(piece), whole.extents(piece), strict=True):
            borrowed = LAYOUT.groups[piece.group].kind is GroupKind.FULL and piece.stop <= 192
            assert (extent.page == there.page) == borrowed
            assert (extent.offset, extent.nbytes) == (there.offset, there.nbytes)
    assert sorted(end_pages(mixed)) == sorted(set(mixed.pages) - {p for b in block_pages(mixed, 1, 5) for p in b})


def test_a_snapshot_and_blocks_make_the_table_of_their_prefix() -> None:
    pool = PagePool(100)
    cache = PrefixCache(pool, 64, snapshots=needs_snapshots(GEOMETRY))
    chain = TokenChain.of(range(128), 64, fingerprint="f", salt="")
    pages = pool.allocate("job", GEOMETRY.pages_for(0, 128))
    table = GEOMETRY.table(0, 128, pages)
    assert cache.keep("job", chain, 0, block_pages(table, 0, 2), Provenance()) == 2
    assert cache.keep_snapshot("job", chain, 128, end_pages(table), Provenance())
    assert pool.release("job") == 0
    lease = cache.lease(chain.hashes, 128, Quality.EXACT, resume=True)
    assert lease is not None
    assert leased_table(GEOMETRY, lease).pages == pages


def test_a_table_of_no_tokens_is_the_room_of_a_snapshot() -> None:
    assert GEOMETRY.pages_for(192, 192) == len(end_pages(GEOMETRY.table(0, 192, range(GEOMETRY.pages_for(0, 192)))))
    plain = PageGeometry.of(KVLayout((FULL,)))
    assert not needs_snapshots(plain)
    assert plain.pages_for(192, 192) == 0


def test_blocks_are_shared_whole_and_fresh_pages_counted() -> None:
    with pytest.raises(ValueError, match="start: 70 is no multiple of 64"):
        compose(GEOMETRY, 70, 300, [(1, 2)], ())
    with pytest.raises(ValueError, match=r"takes \d+ pages beside 1 blocks, got 1"):
        compose(GEOMETRY, 64, 300, [(1, 2)], (3,))
