"""Estimators: what a node claims counts only until something was seen, and a starved link is not called slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.speeds import LinkSpeed, PrefillSpeed
from tests.calm import calm

NOW = 100.0


def test_a_node_is_unmeasured_until_it_claims_or_shows_a_speed() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s is None
    speed.claim(0.0)
    assert speed.tokens_per_s is None
    speed.claim(500.0)
    assert speed.tokens_per_s == 500.0


def test_what_was_observed_outweighs_every_later_claim() -> None:
    speed = PrefillSpeed()
    speed.observe(1000, 10.0)
    speed.claim(1e6)
    assert speed.tokens_per_s == pytest.approx(100.0)


def test_a_first_short_prompt_hardly_moves_the_claimed_speed_and_a_long_one_does() -> None:
    short, long = PrefillSpeed(), PrefillSpeed()
    for speed in (short, long):
        speed.claim(800.0)
    short.observe(5, 0.2)
    long.observe(2000, 10.0)
    assert (short.tokens_per_s or 0) == pytest.approx(800.0, rel=0.02)
    assert (long.tokens_per_s or 0) < 400


@calm
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_the_learnt_speed_stays_within_what_was_seen(samples: list[tuple[int, float]]) -> None:
    speed = PrefillSpeed()
    for tokens, seconds in samples:
        speed.observe(tokens, seconds)
    rates = [tokens / seconds for tokens, seconds in samples]
    assert speed.tokens_per_s is not None
    assert min(rates) * 0.999 <= speed.tokens_per_s <= max(rates) * 1.001


def test_events_without_tokens_or_time_teach_nothing() -> None:
    speed, link = PrefillSpeed(), LinkSpeed()
    speed.observe(0, 1.0)
    speed.observe(10, 0.0)
    link.observe(0, 0.0, 0.0, NOW)
    link.observe_rtt(0.0)
    assert speed.tokens_per_s is None
    assert link.facts(NOW).bytes_per_s is None
    assert link.facts(NOW).rtt_s is None


def test_a_transfer_that_waited_for_its_engine_does_not_lower_the_rate_but_a_bare_one_does() -> None:
    link = LinkSpeed()
    link.observe(1000, 1.0, 1.0, NOW)
    link.observe(1000, 100.0, 0.1, NOW)
    assert link.facts(NOW).bytes_per_s == pytest.approx(1000.0)
    link.observe(1000, 100.0, 100.0, NOW)
    assert link.facts(NOW).bytes_per_s == pytest.approx(1000.0 - 0.3 * 990.0)


@pytest.mark.parametrize(("rtt_s", "rate"), [(0.4, 1000 / 0.6), (0.9, 4000.0), (5.0, 4000.0)])
def test_the_round_trip_before_the_first_byte_does_not_make_a_link_look_slow(rtt_s: float, rate: float) -> None:
    link = LinkSpeed()
    for seen in (rtt_s, 10 * rtt_s):  # the longer one stood in a queue
        link.observe_rtt(seen)
    link.observe(1000, 1.0, 1.0, NOW)
    assert link.facts(NOW).bytes_per_s == pytest.approx(rate)


def test_a_transfer_that_waited_for_its_codec_does_not_lower_the_rate() -> None:
    link = LinkSpeed()
    link.observe(1000, 1.0, 1.0, NOW)
    link.observe(1000, 100.0, 100.0, NOW, codec_s=80.0)
    assert link.facts(NOW).bytes_per_s == pytest.approx(1000.0)
    link.observe(1000, 100.0, 100.0, NOW, codec_s=10.0)
    assert (link.facts(NOW).bytes_per_s or 0) < 1000.0


@calm
@given(st.lists(st.integers(0, 10**9), max_size=20))
def test_queued_bytes_return_to_zero_when_every_transfer_has_ended(sizes: list[int]) -> None:
    link = LinkSpeed()
    for nbytes in sizes:
        link.started(nbytes)
    assert link.facts(NOW).queued_bytes == sum(sizes)
    for nbytes in reversed(sizes):
        link.ended(nbytes)
    assert link.facts(NOW).queued_bytes == 0


def test_a_short_prompt_hardly_changes_the_speed_learnt_from_long_ones() -> None:
    speed = PrefillSpeed()
    speed.observe(10_000, 10.0)
    speed.observe(10, 1.0)
    assert speed.tokens_per_s is not None
    assert speed.tokens_per_s > 900


def test_a_small_bare_transfer_hardly_lowers_the_rate_that_a_large_one_showed() -> None:
    link = LinkSpeed()
    link.observe(10**9, 1.0, 1.0, NOW)
    link.observe(10**4, 0.05, 0.05, NOW)
    assert (link.facts(NOW).bytes_per_s or 0) > 0.99e9


@pytest.mark.parametrize("nonsense", [float("inf"), float("nan"), -1.0])
def test_nonsense_teaches_nothing(nonsense: float) -> None:
    speed, link = PrefillSpeed(), LinkSpeed()
    speed.claim(nonsense)
    speed.observe(10, nonsense)
    link.observe_rtt(nonsense)
    assert speed.tokens_per_s is None
    assert link.facts(NOW).rtt_s is None


def test_what_was_learnt_of_a_link_is_kept_but_not_called_fresh_for_long() -> None:
    link = LinkSpeed()
    assert not link.facts(NOW).fresh
    link.observe(100, 1.0, 1.0, NOW)
    assert link.facts(NOW + 60.0).fresh
    later = link.facts(NOW + 60.1)
    assert (later.fresh, later.bytes_per_s) == (False, 100.0)
