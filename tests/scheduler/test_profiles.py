"""Profiles against published times, KV sizes against layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.presets import case_study_1t, dense_70b, gemma3_270m
from scheduler.profiles import CASE_STUDY_KV, H20_DECODE, H200, KvSize, PrefillProfile, fit_prefill, kv_bytes_per_s

# arXiv 2604.15039, table of the case study's model on 8 x H200: tokens, S_kv in MiB, T_prefill in s, Phi_kv in Gbps.
TABLE = [
    (1024, 190.8, 0.44, 3.61),
    (8192, 308.9, 0.72, 3.59),
    (32_000, 701.3, 1.84, 3.19),
    (130_000, 2316.3, 7.40, 2.62),
]


@pytest.mark.parametrize(("tokens", "mib", "seconds", "gbps"), TABLE)
def test_the_case_study_presets_meet_the_published_table(tokens: int, mib: float, seconds: float, gbps: float) -> None:
    assert CASE_STUDY_KV.nbytes(float(tokens)) / 2**20 == pytest.approx(mib, abs=0.1)
    assert H200.seconds(float(tokens)) == pytest.approx(seconds, rel=0.025)
    assert kv_bytes_per_s(CASE_STUDY_KV, H200, tokens) * 8e-9 == pytest.approx(gbps, rel=0.025)


def test_a_decode_instance_of_the_case_study_speaks_800_tokens_a_second() -> None:
    assert H20_DECODE.tokens_per_s == pytest.approx(800)


@pytest.mark.parametrize("layout", [dense_70b(), gemma3_270m(), case_study_1t()])
@given(tokens=st.integers(1, 200_000))
def test_a_kv_size_equals_its_layouts(layout, tokens: int) -> None:  # type: ignore[no-untyped-def]
    assert KvSize.of(layout).nbytes(float(tokens)) == layout.s_kv(tokens)
    assert KvSize.of(layout).nbytes(np.array([float(tokens)]))[0] == layout.s_kv(tokens)


def test_the_case_studys_layout_and_its_derived_line_agree() -> None:
    derived = KvSize.of(case_study_1t())
    assert derived.per_token == CASE_STUDY_KV.per_token
    assert derived.fixed == pytest.approx(CASE_STUDY_KV.fixed, rel=1e-6)


@given(
    c=st.tuples(st.floats(0.01, 2), st.floats(1e-3, 0.2), st.floats(1e-6, 1e-3)),
    tokens=st.lists(st.sampled_from([500, 1024, 4096, 8192, 32_768, 70_000, 131_072]), min_size=3, unique=True),
)
def test_a_fit_recovers_the_profile_that_made_the_points(c: tuple[float, float, float], tokens: list[int]) -> None:
    true = PrefillProfile("true", *c)
    fitted, error = fit_prefill("fitted", tokens, [true.seconds(float(t)) for t in tokens])
    assert error < 1e-6
    for t in tokens:
        assert fitted.seconds(float(t)) == pytest.approx(true.seconds(float(t)), rel=1e-6)


def test_a_fit_never_has_a_negative_coefficient() -> None:
    # concave: plain least squares would bend downwards
    fitted, error = fit_prefill("concave", [1000, 10_000, 50_000, 100_000], [1.0, 3.0, 5.0, 6.0])
    assert min(fitted.c0_s, fitted.c1_s, fitted.c2_s) >= 0
    assert 0.05 < error < 0.5


def test_a_falling_profile_and_a_fit_of_two_points_are_refused() -> None:
    with pytest.raises(ValueError, match="coefficients"):
        PrefillProfile("falling", 1.0, -0.1, 0.0)
    with pytest.raises(ValueError, match="three points"):
        fit_prefill("two", [1, 2], [1, 2])
