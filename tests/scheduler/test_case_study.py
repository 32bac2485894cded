"""The case study against figures derived from the published tables, and the published figures themselves."""

from __future__ import annotations

import pytest

from scheduler.case_study import PUBLISHED, case_study
from scheduler.throughput import Reading

# Derived from the tables of arXiv 2604.15039: lengths as published, prefill quadratics fitted to its times, 800 decode
# tokens/s an instance. Requests per second; (rate, t, N_p) where the point is searched for.
DERIVED = {
    Reading.POINT: {
        "homogeneous": 2.11,
        "naive": 2.504,
        "as_published": 3.254,
        "best": (3.289, 19_247, 3),
        "4/4": 3.125,
        "fractional": (3.435, 21_363, 3.604),
        "homogeneous_fractional": 2.164,
    },
    Reading.MEAN_SERVICE: {
        "homogeneous": 2.025,
        "naive": 2.411,
        "as_published": 3.219,
        "best": (3.224, 19_476, 3),
        "4/4": 3.125,
        "fractional": (3.386, 21_804, 3.665),
        "homogeneous_fractional": 2.097,
    },
}
SERVICE_S = {"homogeneous": (4.444, 9.722), "prfaas_pd_as_published": (2.168, 3.345), "naive": (1.659, 3.345)}
WITHIN = 0.005


@pytest.fixture(scope="module")
def studies():  # type: ignore[no-untyped-def]
    return case_study()


@pytest.mark.parametrize("reading", list(Reading))
def test_every_derived_rate_is_met(studies, reading: Reading) -> None:  # type: ignore[no-untyped-def]
    outcomes, derived = studies[reading].outcomes, DERIVED[reading]
    for name, expected in (
        ("homogeneous", derived["homogeneous"]),
        ("naive", derived["naive"]),
        ("prfaas_pd_as_published", derived["as_published"]),
        ("homogeneous_fractional", derived["homogeneous_fractional"]),
    ):
        assert outcomes[name].figures.lambda_max == pytest.approx(expected, rel=WITHIN), name
    for name, key in (("prfaas_pd", "best"), ("fractional_bound", "fractional")):
        figures = outcomes[name].figures
        assert (figures.lambda_max, figures.t, figures.n_p) == pytest.approx(derived[key], rel=WITHIN), name
    (four,) = (found for found in studies[reading].splits if found.n_p == 4)
    assert four.lambda_max == pytest.approx(derived["4/4"], rel=WITHIN)


@pytest.mark.parametrize("reading", list(Reading))
@pytest.mark.parametrize("name", SERVICE_S)
def test_service_times_are_the_derived_ones(studies, reading: Reading, name: str) -> None:  # type: ignore[no-untyped-def]
    figures = studies[reading].outcomes[name].figures
    assert (figures.ttft_mean_s, figures.ttft_p90_s) == pytest.approx(SERVICE_S[name], rel=WITHIN)


def test_the_true_reading_gives_the_derived_ratios_and_egress(studies) -> None:  # type: ignore[no-untyped-def]
    outcomes = studies[Reading.MEAN_SERVICE].outcomes
    assert outcomes["prfaas_pd"].figures.ratio_to_homogeneous == pytest.approx(1.59, abs=0.005)
    assert outcomes["fractional_bound"].figures.ratio_to_homogeneous == pytest.approx(1.67, abs=0.005)
    shared = outcomes["fractional_bound"].figures.lambda_max / outcomes["homogeneous_fractional"].figures.lambda_max
    assert shared == pytest.approx(1.615, abs=0.005)
    assert outcomes["prfaas_pd_as_published"].figures.egress_gbps == pytest.approx(12.27, rel=WITHIN)


@pytest.mark.parametrize("reading", list(Reading))
def test_the_published_rates_lie_within_five_per_cent(studies, reading: Reading) -> None:  # type: ignore[no-untyped-def]
    for name, published in PUBLISHED.items():
        ours = studies[reading].outcomes[name].figures
        assert ours.lambda_max == pytest.approx(published.lambda_max, rel=0.05), name
        assert (ours.n_p or None, ours.n_d) == (published.n_p, published.n_d)


@pytest.mark.parametrize("reading", list(Reading))
def test_a_narrow_link_binds_raises_the_threshold_and_ruins_naive_offloading(studies, reading: Reading) -> None:  # type: ignore[no-untyped-def]
    narrow = case_study(link_gbps=5.0)[reading].outcomes
    wide = studies[reading].outcomes
    found = narrow["prfaas_pd"]
    demand = found.rates.demand
    assert demand.link_bound
    assert not wide["prfaas_pd"].rates.demand.link_bound
    assert demand.t > wide["prfaas_pd"].rates.demand.t
    assert found.figures.theta_prfaas == pytest.approx(5e9 / 8 / demand.kv_long_bytes)
    assert found.figures.egress_gbps == pytest.approx(5.0, rel=1e-5)
    assert narrow["naive"].figures.lambda_max < narrow["homogeneous"].figures.lambda_max
