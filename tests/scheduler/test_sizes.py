"""The size of a transfer equals its plan's, for every kind of layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import plan_transfer
from scheduler.sizes import last_chunk, size_facts, transfer_bytes
from tests.calm import calm


def group(kind: GroupKind, layers: range, window: int | None = None) -> GroupSpec:
    shape = (7, 5) if kind is GroupKind.STATE else (2, 8)
    tensors = (TensorSpec("a", DType.BFLOAT16, shape), TensorSpec("b", DType.FLOAT32, shape))
    return GroupSpec(kind, tuple(LayerSpec(index, tensors) for index in layers), window)


HYBRID = KVLayout(
    (
        group(GroupKind.FULL, range(2)),
        group(GroupKind.SLIDING, range(2, 5), window=20),
        group(GroupKind.STATE, range(5, 7)),
    )
)
SIZES = size_facts(HYBRID)


@calm
@given(st.integers(0, 90), st.integers(1, 60), st.sampled_from([7, 16, 64]))
def test_it_equals_the_plan(start: int, length: int, chunk: int) -> None:
    stop = start + length
    assert transfer_bytes(SIZES, start, stop) == plan_transfer(HYBRID, start, stop, chunk).nbytes


@calm
@given(st.integers(0, 90), st.integers(1, 60), st.sampled_from([7, 16, 64]))
def test_the_last_chunk_is_what_the_plan_releases_last(start: int, length: int, chunk: int) -> None:
    stop = start + length
    plan = plan_transfer(HYBRID, start, stop, chunk)
    last = [piece for piece in plan.pieces if piece.chunk == plan.pieces[-1].chunk]
    tokens = next(piece.stop - piece.start for piece in last if HYBRID.groups[piece.group].kind is GroupKind.FULL)
    assert last_chunk(SIZES, start, stop, chunk) == (tokens, sum(piece.nbytes for piece in last))


def test_an_empty_range_has_no_last_chunk_and_a_grid_of_nothing_is_refused() -> None:
    assert last_chunk(SIZES, 5, 5, 16) == (0, 0)
    with pytest.raises(ValueError, match="chunk_tokens must be positive"):
        last_chunk(SIZES, 0, 5, 0)


@calm
@given(st.integers(0, 300))
def test_from_the_beginning_it_is_s_kv(tokens: int) -> None:
    assert transfer_bytes(SIZES, 0, tokens) == HYBRID.s_kv(tokens)


def test_a_backward_range_is_refused() -> None:
    with pytest.raises(ValueError, match="start <= stop"):
        transfer_bytes(SIZES, 5, 4)
