"""What is learnt of a node's codecs: the start measurement, then real transfers, which fade."""

from __future__ import annotations

import pytest

from kvcache.quality import Quality
from scheduler.codec_speeds import HALF_LIFE_S, KEPT_S, CodecSpeeds, Work
from scheduler.facts import CodecFacts

MIB = 1 << 20
NOW = 1000.0
START = Work(1000, 500, 1000 / 1e8)


def speeds(start: Work = START) -> CodecSpeeds:
    one = CodecSpeeds()
    one.know("int8", Quality.NEAR, start, start)
    return one


def only(one: CodecSpeeds, now: float = NOW) -> CodecFacts:
    [facts] = one.facts(now)
    return facts


def test_until_a_transfer_the_start_measurement_counts() -> None:
    assert only(speeds()) == CodecFacts("int8", Quality.NEAR, 0.5, pytest.approx(1e8), pytest.approx(1e8))


def test_a_codec_that_was_not_measured_has_no_figures_rather_than_zeros() -> None:
    assert only(speeds(Work())) == CodecFacts("int8", Quality.NEAR, None, None, None)


def test_a_real_transfer_outweighs_the_start_measurement_by_its_bytes() -> None:
    one = speeds()
    one.count("int8", Work(99 * MIB, 99 * MIB * 0.3, 99 * MIB / 2e8), Work(), NOW)
    facts = only(one)
    assert facts.wire_ratio == pytest.approx(0.302)
    assert facts.encode_bytes_per_s == pytest.approx(100 / (99 / 2e8 + 1 / 1e8))
    assert facts.decode_bytes_per_s == pytest.approx(1e8)


def test_only_the_growth_of_the_sums_is_learnt_from() -> None:
    once, often = speeds(), speeds()
    total = Work(50 * MIB, 20 * MIB, 0.5)
    once.count("int8", total, total, NOW)
    for _ in range(5):
        often.count("int8", total, total, NOW)
    assert only(once) == only(often)


def test_what_was_seen_fades_until_the_start_measurement_is_what_is_left() -> None:
    one = speeds()
    one.count("int8", Work(MIB, MIB * 0.9, MIB / 1e6), Work(), NOW)
    ratios = [only(one, NOW + n * HALF_LIFE_S).wire_ratio or 0.0 for n in range(4)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == pytest.approx(0.7)
    assert ratios[1] == pytest.approx((0.9 / 2 + 0.5) / 1.5)
    assert only(one, NOW + 40 * HALF_LIFE_S).encode_bytes_per_s == pytest.approx(1e8, rel=1e-3)


@pytest.mark.parametrize(
    "nonsense",
    [
        Work(-MIB, MIB, 1.0),
        Work(MIB, 0, 1.0),
        Work(MIB, 100 * MIB, 1.0),
        Work(MIB, MIB, -1.0),
        Work(MIB, MIB, float("nan")),
        Work(MIB, MIB, float("inf")),
        Work(MIB, MIB, 0.0),
        Work(MIB, MIB, 5e-324),
    ],
)
def test_nonsense_teaches_nothing(nonsense: Work) -> None:
    one = speeds()
    one.count("int8", nonsense, nonsense, NOW)
    assert only(one) == only(speeds())
    assert only(speeds(nonsense)).encode_bytes_per_s is None


def test_sums_that_begin_again_teach_nothing_until_they_grow() -> None:
    one = speeds()
    one.count("int8", Work(10 * MIB, 5 * MIB, 0.1), Work(), NOW)
    before = only(one)
    one.count("int8", Work(MIB, MIB, 1.0), Work(), NOW)
    assert only(one) == before
    one.count("int8", Work(2 * MIB, 2 * MIB, 2.0), Work(), NOW)
    assert (only(one).wire_ratio or 0) > (before.wire_ratio or 0)


def test_of_a_codec_that_the_node_never_named_nothing_is_kept() -> None:
    one = speeds()
    one.count("int4", Work(MIB, MIB, 1.0), Work(MIB, MIB, 1.0), NOW)
    assert [facts.name for facts in one.facts(NOW)] == ["int8"]


def test_facts_are_kept_for_a_moment_but_what_is_new_shows_at_once() -> None:
    one = speeds()
    before = one.facts(NOW)
    assert one.facts(NOW + KEPT_S / 2) is before
    one.count("int8", Work(99 * MIB, 99 * MIB * 0.3, 99 * MIB / 2e8), Work(), NOW + KEPT_S / 2)
    seen = only(one, NOW + KEPT_S / 2)
    assert seen.wire_ratio == pytest.approx(0.302)
    assert only(one, NOW + 2 * KEPT_S) != seen, "it fades"
    one.know("fp8", Quality.NEAR, START, START)
    assert [facts.name for facts in one.facts(NOW + 2 * KEPT_S)] == ["fp8", "int8"]
