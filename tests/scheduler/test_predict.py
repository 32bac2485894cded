"""Predictions: right where everything was measured, None where anything was not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.facts import LinkFacts, PrefillNodeFacts
from scheduler.predict import compute_s, transfer_s, ttft_s
from tests.calm import calm

NODE = PrefillNodeFacts("p", queued_tokens=500, free_slots=1, prefill_tokens_per_s=1000.0)


def test_a_computation_bound_way_costs_its_queue_its_tokens_and_a_round_trip() -> None:
    link = LinkFacts(bytes_per_s=1e9, rtt_s=0.05, wire_ratio=0.5)
    assert ttft_s(NODE, 1500, 1000, "lossless", link) == pytest.approx(0.5 + 1.5 + 0.05)


def test_a_link_bound_way_costs_its_bytes_after_the_codec_behind_those_already_queued() -> None:
    link = LinkFacts(bytes_per_s=1000.0, rtt_s=0.0, queued_bytes=4000, wire_ratio=0.5)
    assert ttft_s(NODE, 1500, 6000, "lossless", link) == pytest.approx((4000 + 6000) * 0.5 / 1000)
    assert ttft_s(NODE, 1500, 6000, "raw", link) == pytest.approx((4000 + 6000) / 1000)


@pytest.mark.parametrize("nothing", [None, 0.0])
def test_nothing_is_divided_by_a_number_that_was_never_measured(nothing: float | None) -> None:
    good = LinkFacts(bytes_per_s=1e6, rtt_s=0.01, wire_ratio=0.5)
    slow = PrefillNodeFacts("p", 0, 1, nothing)
    assert compute_s(10, nothing) is None
    assert ttft_s(slow, 10, 10, "raw", good) is None
    assert ttft_s(NODE, 10, 10, "raw", LinkFacts(nothing, 0.01)) is None
    assert transfer_s(10, "lossless", LinkFacts(1e6, 0.01)) is None


@calm
@given(st.integers(0, 10**6), st.integers(0, 10**10), st.integers(0, 10**6), st.floats(1, 1e6), st.floats(1, 1e10))
def test_more_work_is_never_predicted_to_be_quicker(
    tokens: int, nbytes: int, more: int, speed: float, rate: float
) -> None:
    node = PrefillNodeFacts("p", 0, 1, speed)
    link = LinkFacts(rate, 0.01)
    less = ttft_s(node, tokens, nbytes, "raw", link)
    bigger = ttft_s(node, tokens + more, nbytes + more, "raw", link)
    assert less is not None
    assert bigger is not None
    assert bigger >= less
