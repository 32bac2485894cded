"""The fluid bound, on layouts small enough to work it out by hand."""

from __future__ import annotations

import pytest

from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import TransferPlan, plan_transfer
from tests.bench.release import largest_layer, releases, tail_s

KV = TensorSpec("k", DType.BFLOAT16, (1, 5))
STATE = TensorSpec("recurrent", DType.FLOAT32, (25,))
FULL = GroupSpec(GroupKind.FULL, (LayerSpec(0, (KV,)), LayerSpec(1, (KV,))))
HELD_BACK = GroupSpec(GroupKind.STATE, (LayerSpec(2, (STATE, STATE)),))


def plan(*groups: GroupSpec, start: int = 0, stop: int = 40) -> TransferPlan:
    """20 bytes for each token by chunks of 10, and 200 for the states."""
    return plan_transfer(KVLayout(groups), start, stop, 10)


def test_a_fast_link_still_has_the_last_chunk_to_carry() -> None:
    assert tail_s(releases(plan(FULL), 4.0, 1.0), 1000.0) == pytest.approx(0.2)


def test_windows_and_states_cross_after_the_end() -> None:
    assert tail_s(releases(plan(FULL, HELD_BACK), 4.0, 1.0), 1000.0) == pytest.approx(0.4)


def test_a_slow_link_has_a_backlog_by_then() -> None:
    assert tail_s(releases(plan(FULL), 4.0, 1.0), 100.0) == pytest.approx(1.0 + 4 * 2.0 - 4.0)


def test_what_a_codec_saves_does_not_cross() -> None:
    assert tail_s(releases(plan(FULL), 4.0, 0.5), 100.0) == pytest.approx(1.0)


def test_a_first_chunk_off_the_grid_is_shorter() -> None:
    assert [tuple(one) for one in releases(plan(FULL, start=6, stop=26), 2.0, 1.0)] == [
        pytest.approx((0.4, 80)),
        pytest.approx((1.4, 200)),
        pytest.approx((2.0, 120)),
    ]


def test_the_largest_layer_of_the_last_chunk_may_be_a_state() -> None:
    assert largest_layer(plan(FULL)) == 100
    assert largest_layer(plan(FULL, HELD_BACK)) == 200
