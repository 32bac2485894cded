"""A link's rate from observations: starved ones never lower it, a limit is believed soon, nonsense teaches nothing."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.link_rate import BEST_HALVES_S, LinkRate, plausible_rate
from tests.calm import calm

NOW = 100.0
NONSENSE = [0.0, -1.0, nan, inf, -inf, 1e30]
anything = st.one_of(st.floats(), st.sampled_from(NONSENSE), st.floats(1.0, 1e12))


def known(rate: float) -> LinkRate:
    link = LinkRate()
    link.between(0.0, rate, NOW)
    assert link.value == rate
    return link


def arrived(link: LinkRate, nbytes: int, transfer_s: float, exposed_s: float | None = None, **more: object) -> float:
    """The estimate after a committed transfer, all of it bare unless told otherwise."""
    figures = {"rtt_s": 0.0, "codec_s": 0.0, "alone": True, "now": NOW} | more
    link.committed(nbytes, transfer_s, transfer_s if exposed_s is None else exposed_s, **figures)  # type: ignore[arg-type]
    return link.value or 0.0


def test_a_link_that_only_carried_a_trickle_is_unmeasured() -> None:
    link = LinkRate()
    link.between(20.0, 0.0, NOW)
    assert link.value is None
    assert link.best(NOW) is None


def test_a_cut_to_a_twentieth_is_believed_at_once_and_a_recovery_after_two_observations() -> None:
    link = known(125e6)
    link.between(6e6, 6.25e6, NOW)
    assert 6.25e6 < (link.value or 0) < 10e6
    for _ in range(2):
        link.between(120e6, 0.0, NOW)
    assert (link.value or 0) > 100e6


def test_what_had_too_little_to_send_never_lowers_the_rate() -> None:
    link = known(1e6)
    link.between(1.0, 0.0, NOW)
    assert link.value == 1e6


def test_figures_that_contradict_each_other_are_taken_for_the_higher() -> None:
    link = known(10e6)
    link.between(5e6, 1e6, NOW)
    assert 5e6 <= (link.value or 0) < 10e6


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_teaches_nothing(nonsense: float) -> None:
    link = known(1e6)
    link.between(nonsense, nonsense, NOW + 1)
    arrived(link, 1000, nonsense)
    arrived(link, 0, 1.0)
    arrived(link, -5, 1.0)
    if nonsense != 1e30:  # a transfer may take for ever
        assert (link.value, link.confirmed_at) == (1e6, NOW)


def test_a_transfer_that_waited_for_its_engine_does_not_lower_the_rate_but_a_bare_one_does() -> None:
    link = LinkRate()
    assert arrived(link, 1000, 1.0) == 1000.0
    assert arrived(link, 1000, 100.0, exposed_s=0.1) == 1000.0
    assert arrived(link, 1000, 100.0) == pytest.approx(1000.0 - 0.3 * 990.0)


def test_a_transfer_that_shared_the_link_or_waited_for_its_codec_does_not_lower_the_rate() -> None:
    link = LinkRate()
    arrived(link, 1000, 1.0)
    assert arrived(link, 1000, 100.0, alone=False) == 1000.0
    assert arrived(link, 1000, 100.0, codec_s=80.0) == 1000.0
    assert arrived(link, 1000, 100.0, codec_s=10.0) < 1000.0


@pytest.mark.parametrize(("rtt_s", "rate"), [(0.4, 1000 / 0.6), (0.9, 4000.0), (5.0, 4000.0)])
def test_the_round_trip_before_the_first_byte_does_not_make_a_link_look_slow(rtt_s: float, rate: float) -> None:
    assert arrived(LinkRate(), 1000, 1.0, rtt_s=rtt_s) == pytest.approx(rate)


def test_a_small_bare_transfer_hardly_lowers_the_rate_that_a_large_one_showed() -> None:
    link = LinkRate()
    arrived(link, 10**9, 1.0)
    assert arrived(link, 10**4, 0.05) > 0.99e9


def test_the_best_of_late_is_forgotten_by_half_each_half_minute() -> None:
    link = known(16e6)
    link.between(0.0, 1e6, NOW)
    low = link.value or 0
    assert link.best(NOW) == 16e6
    assert link.best(NOW + BEST_HALVES_S) == pytest.approx(8e6)
    assert link.best(NOW + 100 * BEST_HALVES_S) == low


@calm
@given(st.lists(st.tuples(anything, anything), max_size=30))
def test_whatever_is_told_the_estimate_lies_within_what_was_told(seen: list[tuple[float, float]]) -> None:
    link = LinkRate()
    told = [rate for pair in seen for rate in pair if plausible_rate(rate)]
    for n, (low, high) in enumerate(seen):
        link.between(low, high, NOW + n)
        assert link.value is None or min(told) * 0.999 <= link.value <= max(told) * 1.001
        best = link.best(NOW + n)
        assert (best is None) == (link.value is None)
        assert best is None or best >= (link.value or 0)


@calm
@given(
    st.floats(1e3, 1e10),
    st.lists(st.tuples(anything, anything), max_size=8),
    st.floats(1e3, 1e10),
    st.floats(1.0, 10.0),
)
def test_a_better_observation_never_leaves_a_lower_estimate(
    start: float, seen: list[tuple[float, float]], high: float, factor: float
) -> None:
    worse, better = known(start), known(start)
    for link in (worse, better):
        for pair in seen:
            link.between(*pair, NOW)
    worse.between(0.0, high, NOW)
    better.between(0.0, high * factor, NOW)
    assert (worse.value or 0) <= (better.value or 0) * (1 + 1e-9)


@calm
@given(st.floats(1e3, 1e12), st.floats(1e3, 1e12))
def test_what_was_believed_is_forgotten_when_the_link_shows_something_else(before: float, truth: float) -> None:
    link = known(before)
    for _ in range(25):
        link.between(truth, truth, NOW)
    assert link.value == pytest.approx(truth, rel=1e-3)
