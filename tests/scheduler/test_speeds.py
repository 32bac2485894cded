"""What a node claims of its speed counts only until something was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.speeds import PrefillSpeed
from tests.calm import calm


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
    speed = PrefillSpeed()
    speed.observe(0, 1.0)
    speed.observe(10, 0.0)
    assert speed.tokens_per_s is None


def test_a_short_prompt_hardly_changes_the_speed_learnt_from_long_ones() -> None:
    speed = PrefillSpeed()
    speed.observe(10_000, 10.0)
    speed.observe(10, 1.0)
    assert speed.tokens_per_s is not None
    assert speed.tokens_per_s > 900


@pytest.mark.parametrize("nonsense", [float("inf"), float("nan"), -1.0])
def test_nonsense_teaches_nothing(nonsense: float) -> None:
    speed = PrefillSpeed()
    speed.claim(nonsense)
    speed.observe(10, nonsense)
    assert speed.tokens_per_s is None
