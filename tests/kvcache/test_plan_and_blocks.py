"""The plan covers every byte once, in release order; the page table gives each byte one place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.blocks import PageGeometry, PagePool, PoolFull
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import chunk_bounds, plan_transfer


def token_layer(index: int, heads: int, dim: int) -> LayerSpec:
    return LayerSpec(index, tuple(TensorSpec(name, DType.BFLOAT16, (heads, dim)) for name in ("k", "v")))


def hybrid_layout(window: int = 128) -> KVLayout:
    """Full, sliding (with other heads) and state layers; layer 2 stands in two groups, as in falcon_h1."""
    state = (
        TensorSpec("conv", DType.BFLOAT16, (48, 4)),
        TensorSpec("recurrent", DType.FLOAT32, (4, 70, 33)),
    )
    return KVLayout(
        (
            GroupSpec(GroupKind.FULL, (token_layer(2, 1, 24), token_layer(5, 1, 24))),
            GroupSpec(GroupKind.SLIDING, (token_layer(0, 2, 16), token_layer(3, 2, 16)), window),
            GroupSpec(GroupKind.STATE, (LayerSpec(1, state), LayerSpec(2, state), LayerSpec(4, state))),
        )
    )


ranges = st.tuples(st.integers(0, 900), st.integers(1, 900)).map(lambda r: (r[0], r[0] + r[1]))


@given(ranges, st.sampled_from([64, 256, 100]))
def test_a_plan_holds_each_token_of_each_tensor_exactly_once(span: tuple[int, int], chunk: int) -> None:
    start, stop = span
    layout = hybrid_layout()
    plan = plan_transfer(layout, start, stop, chunk)
    covered: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for piece in plan.pieces:
        covered.setdefault((piece.group, piece.layer, piece.tensor), []).append((piece.start, piece.stop))
    for (g, _, _), stretches in covered.items():
        group = layout.groups[g]
        if group.kind is GroupKind.STATE:
            assert stretches == [(stop, stop)]
            continue
        first = start if group.kind is GroupKind.FULL else group.first_token(stop)
        assert stretches[0][0] == first
        assert stretches[-1][1] == stop
        assert all(a[1] == b[0] for a, b in pairwise(stretches))
    assert len(covered) == 2 * sum(len(group.layers) for group in layout.groups)
    assert [piece.seq for piece in plan.pieces] == list(range(len(plan.pieces)))


@given(ranges)
def test_pieces_come_in_the_order_in_which_a_prefill_finishes_them(span: tuple[int, int]) -> None:
    layout = hybrid_layout()
    plan = plan_transfer(layout, *span, 256)
    order = [(piece.chunk, layout.groups[piece.group].layers[piece.layer].index) for piece in plan.pieces]
    assert order == sorted(order)
    last = plan.pieces[-1].chunk
    assert all(p.chunk == last for p in plan.pieces if layout.groups[p.group].kind is not GroupKind.FULL)


@given(st.integers(1, 2000))
def test_a_whole_transfer_carries_s_kv_bytes(tokens: int) -> None:
    layout = hybrid_layout()
    assert plan_transfer(layout, 0, tokens, 256).nbytes == layout.s_kv(tokens)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 300))
def test_chunk_boundaries_do_not_depend_on_where_a_prefill_starts(start: int, length: int, chunk: int) -> None:
    bounds = list(chunk_bounds(start, start + length, chunk))
    assert bounds[0][0] == start
    assert bounds[-1][1] == start + length
    assert all(stop % chunk == 0 for _, stop in bounds[:-1])
    assert all(stop - first <= chunk for first, stop in bounds)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 5), (6, 5), (-1, 3)])
def test_an_empty_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        plan_transfer(hybrid_layout(), start, stop, 256)


@given(ranges)
def test_every_byte_of_a_transfer_has_one_place_of_its_own(span: tuple[int, int]) -> None:
    layout = hybrid_layout()
    geometry = PageGeometry.of(layout)
    table = geometry.table(*span, list(range(geometry.pages_for(*span))))
    taken: list[tuple[int, int, int]] = []
    for piece in plan_transfer(layout, *span, 256).pieces:
        extents = table.extents(piece)
        assert sum(extent.nbytes for extent in extents) == piece.nbytes
        taken += [(extent.page, extent.offset, extent.offset + extent.nbytes) for extent in extents]
    taken.sort()
    assert all(stop <= geometry.page_bytes for _, _, stop in taken)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(taken))
    assert {page for page, _, _ in taken} == set(range(len(table.pages)))


def test_a_table_takes_exactly_the_pages_it_needs() -> None:
    geometry = PageGeometry.of(hybrid_layout())
    need = geometry.pages_for(0, 300)
    with pytest.raises(ValueError, match=f"takes {need} pages, got {need - 1}"):
        geometry.table(0, 300, list(range(need - 1)))


def test_a_pool_gives_all_pages_or_none() -> None:
    pool = PagePool(8)
    pool.allocate("a", 5)
    with pytest.raises(PoolFull, match="4 pages asked for, 3 of 8 free"):
        pool.allocate("b", 4)
    assert pool.free_pages == 3
    assert pool.owners == {"a": 5}


def test_an_owner_holds_one_allocation_and_frees_it_once() -> None:
    pool = PagePool(8)
    pool.allocate("a", 5)
    with pytest.raises(ValueError, match="already holds"):
        pool.allocate("a", 1)
    assert pool.release("a") == 5
    assert pool.release("a") == 0
    pool.check_integrity()


def test_whoever_takes_as_many_pages_as_were_just_freed_gets_those_in_the_same_order() -> None:
    pool = PagePool(8)
    pages = pool.allocate("a", 5)
    pool.release("a")
    assert pool.allocate("b", 5) == pages


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=60))
def test_no_page_is_ever_lost_or_owned_twice(steps: list[tuple[int, int]]) -> None:
    pool = PagePool(16)
    for owner, count in steps:
        name = str(owner)
        if name in pool.owners:
            pool.release(name)
        elif count <= pool.free_pages:
            pool.allocate(name, count)
        pool.check_integrity()


@pytest.mark.parametrize(("kind", "window"), [(GroupKind.SLIDING, None), (GroupKind.FULL, 64), (GroupKind.SLIDING, 1)])
def test_a_window_belongs_to_sliding_groups_alone(kind: GroupKind, window: int | None) -> None:
    with pytest.raises(ValueError, match="window"):
        GroupSpec(kind, (token_layer(0, 1, 8),), window)
