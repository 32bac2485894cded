"""Predictions: right where everything was measured, None where anything was not."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcache.quality import Quality
from scheduler.facts import CodecFacts, LinkFacts, PrefillCurve, PrefillNodeFacts
from scheduler.predict import codec_s, compute_s, pace, wait_s, wire_ratio
from tests.calm import calm

NODE = PrefillNodeFacts("p", queued_tokens=500, free_slots=1, prefill=PrefillCurve.at_rate(1000.0))
RAW = CodecFacts("raw", Quality.EXACT, None, None, None)
HALF = CodecFacts("lossless", Quality.EXACT, 0.5, 1e9, 1e9)


class Export(NamedTuple):
    start: int
    stop: int
    raw_bytes: int
    last_tokens: int = 0
    last_bytes: int = 0
    not_before_s: float = 0.0


def ttft_s(node: PrefillNodeFacts, export: Export, codec: CodecFacts, link: LinkFacts) -> float | None:
    share = export.last_bytes / export.raw_bytes if export.raw_bytes else 0.0
    paced = pace(node, link, export.start, export.stop, export.last_tokens, share, export.not_before_s)
    ratio = wire_ratio(codec)
    coding = codec_s(export.raw_bytes, codec, node.encoders, codec.decode_bytes_per_s)
    if paced is None or ratio is None or coding is None:
        return None
    return paced.ttft_s(export.raw_bytes * ratio, coding)


def test_a_computation_bound_way_costs_its_queue_its_tokens_and_a_round_trip() -> None:
    link = LinkFacts(bytes_per_s=1e9, rtt_s=0.05)
    assert ttft_s(NODE, Export(0, 1500, 1000), HALF, link) == pytest.approx(0.5 + 1.5 + 0.05)


def test_a_link_bound_way_costs_its_encoded_bytes_behind_those_already_queued() -> None:
    link = LinkFacts(bytes_per_s=1000.0, rtt_s=0.0, queued_bytes=4000)
    assert ttft_s(NODE, Export(0, 1500, 6000), HALF, link) == pytest.approx((4000 + 6000 * 0.5) / 1000)
    assert ttft_s(NODE, Export(0, 1500, 6000), RAW, link) == pytest.approx((4000 + 6000) / 1000)


def test_the_slowest_of_encoding_sending_and_decoding_counts_from_when_the_engine_begins() -> None:
    link = LinkFacts(bytes_per_s=2000.0, rtt_s=0.0)
    for slow in (replace(HALF, encode_bytes_per_s=500.0), replace(HALF, decode_bytes_per_s=500.0)):
        assert ttft_s(NODE, Export(0, 1500, 6000), slow, link) == pytest.approx(0.5 + 6000 / 500)
    assert ttft_s(NODE, Export(0, 1500, 6000), replace(HALF, encode_bytes_per_s=1e6), link) == pytest.approx(0.5 + 1.5)


def test_several_processors_encode_one_transfer_and_one_decodes_it() -> None:
    slow = replace(HALF, encode_bytes_per_s=100.0, decode_bytes_per_s=300.0)
    assert [codec_s(600, slow, encoders, slow.decode_bytes_per_s) for encoders in (1, 2, 4)] == pytest.approx(
        [6.0, 3.0, 2.0]
    )
    link = LinkFacts(bytes_per_s=1e9, rtt_s=0.0)
    assert ttft_s(replace(NODE, encoders=2), Export(0, 10, 600), slow, link) == pytest.approx(0.5 + 3.0)


def test_what_is_final_only_with_the_last_chunk_cannot_leave_before_it_is_begun() -> None:
    """Of 1.5 s the last chunk takes 0.5 s, so 4500 bytes leave after 0.5 + 1.0 s, at 1000 raw bytes per second."""
    link = LinkFacts(bytes_per_s=500.0, rtt_s=0.0)
    export = Export(0, 1500, 5000, last_tokens=500, last_bytes=4500)
    assert ttft_s(NODE, export, HALF, link) == pytest.approx(0.5 + 1.0 + 4.5)
    assert ttft_s(NODE, export._replace(last_tokens=0, last_bytes=0), HALF, link) == pytest.approx(0.5 + 5.0)


def test_a_node_sends_no_faster_than_its_share_of_the_way_out() -> None:
    link = LinkFacts(bytes_per_s=2000.0, rtt_s=0.0)
    for share, seconds in ((1000.0, 6.0), (9000.0, 3.0)):
        leased = replace(NODE, egress_bytes_per_s=share)
        assert ttft_s(leased, Export(0, 10, 6000), RAW, link) == pytest.approx(0.5 + seconds)


def test_nothing_is_computed_before_the_prefix_has_come_that_it_builds_on() -> None:
    link = LinkFacts(bytes_per_s=1e9, rtt_s=0.0)
    for arrives, begins in ((0.2, 0.5), (0.9, 0.9)):
        export = Export(500, 1500, 1000, not_before_s=arrives)
        assert ttft_s(NODE, export, RAW, link) == pytest.approx(begins + 1.0)


def test_a_token_takes_longer_the_more_come_before_it_and_what_is_cached_takes_nothing() -> None:
    curve = PrefillCurve(0.1, 1e-3, 1e-6)
    assert compute_s(0, 2000, curve) == pytest.approx(0.1 + 2.0 + 4.0)
    assert compute_s(1000, 2000, curve) == pytest.approx(0.1 + 1.0 + 3.0)
    assert compute_s(2000, 2000, curve) == 0.0


def test_a_wait_is_taken_from_seconds_where_they_are_known() -> None:
    assert wait_s(NODE) == pytest.approx(0.5)
    assert wait_s(replace(NODE, queued_s=0.2)) == 0.2
    assert wait_s(replace(NODE, queued_s=None, prefill=None)) is None
    assert wait_s(replace(NODE, queued_tokens=0, prefill=None)) == 0.0


@pytest.mark.parametrize("nothing", [None, 0.0])
def test_nothing_is_divided_by_a_number_that_was_never_measured(nothing: float | None) -> None:
    good = LinkFacts(bytes_per_s=1e6, rtt_s=0.01)
    slow = PrefillNodeFacts("p", 0, 1, None)
    export = Export(0, 10, 10)
    assert compute_s(0, 10, None) is None
    assert ttft_s(slow, export, RAW, good) is None
    assert ttft_s(NODE, export, RAW, LinkFacts(nothing, 0.01)) is None
    assert ttft_s(NODE, export, replace(HALF, wire_ratio=None), good) is None
    assert ttft_s(NODE, export, replace(HALF, encode_bytes_per_s=nothing), good) is None
    assert codec_s(10, HALF, 1, nothing) == pytest.approx(1e-8)
    assert codec_s(10, replace(RAW, encode_bytes_per_s=nothing), 1, None) == 0.0


@calm
@given(st.integers(0, 10**6), st.integers(0, 10**10), st.integers(0, 10**6), st.floats(1, 1e6), st.floats(1, 1e10))
def test_more_work_is_never_predicted_to_be_quicker(
    tokens: int, nbytes: int, more: int, speed: float, rate: float
) -> None:
    node = PrefillNodeFacts("p", 0, 1, PrefillCurve.at_rate(speed))
    link = LinkFacts(rate, 0.01)
    less = ttft_s(node, Export(0, tokens, nbytes), RAW, link)
    bigger = ttft_s(node, Export(0, tokens + more, nbytes + more), RAW, link)
    assert less is not None
    assert bigger is not None
    assert bigger >= less
