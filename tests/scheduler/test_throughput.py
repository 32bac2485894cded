"""Equations 2 to 8, against hand calculations and against what must hold for any deployment."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.lengths import LengthDistribution, TruncatedLogNormal
from scheduler.observed_lengths import LengthHistogram, ObservedLengths
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200, DecodeProfile, KvSize, PrefillProfile
from scheduler.split_search import SplitSearch
from scheduler.throughput import (
    Deployment,
    LocalNodes,
    PrefillCluster,
    PrefillNodes,
    Reading,
    divide,
    rates,
)

PAPER = TruncatedLogNormal(9.90, 1.00, 128, 131_072)
BOTH = list(Reading)
SEARCH_REL = 1e-6


def site(remote: int = 4, local: int = 8, gbps: float = 100.0) -> Deployment:
    cluster = PrefillCluster("remote", (PrefillNodes(remote, H200),), gbps * 1e9 / 8)
    return Deployment((LocalNodes(local, H20, H20_DECODE),), (cluster,), CASE_STUDY_KV, 1024)


def observed(*lengths: int) -> ObservedLengths:
    histogram = LengthHistogram(half_life_s=1e9)
    for tokens in lengths:
        histogram.add(tokens, now=0.0)
    snapshot = histogram.snapshot()
    assert snapshot is not None
    return snapshot


def test_every_rate_is_its_equations() -> None:
    profile = PrefillProfile("flat", 1.0, 0.1, 0.0)
    local = LocalNodes(5, profile, DecodeProfile(batch=10, step_s=0.02))
    fast = PrefillNodes(2, PrefillProfile("fast", 0.5, 0.05, 0.0))
    kv = KvSize(fixed=1e6, per_token=1e3)
    deployment = Deployment((local,), (PrefillCluster("r", (fast,), 50e6),), kv, output_tokens=100)
    lengths = observed(1000, 2000, 10_000, 40_000)

    demand = divide(deployment, lengths, 5000, Reading.POINT)
    assert (demand.p, demand.l_long, demand.l_short) == pytest.approx((0.5, 25_000, 1500))
    assert demand.kv_long_bytes == pytest.approx(26e6)
    (remote,) = demand.remote
    assert remote.compute == pytest.approx(2 / 1.75)
    assert remote.link == pytest.approx(50 / 26)
    assert demand.theta_prfaas == pytest.approx(2 / 1.75)
    assert demand.needed_egress_bytes_per_s == pytest.approx(2 / 1.75 * 26e6)

    found = rates(deployment, demand, (2,))
    assert found.theta_pdp == pytest.approx(2 / 1.15)
    assert found.theta_pdd == pytest.approx(3 * 10 / (0.02 * 100))
    assert found.lambda_max == pytest.approx(min(2 / 1.75 / 0.5, 2 / 1.15 / 0.5, 15))
    assert found.egress_bytes_per_s == pytest.approx(found.lambda_max * 0.5 * 26e6)


def test_mean_service_is_the_mean_of_the_times() -> None:
    bent = PrefillProfile("bent", 0.0, 0.0, 0.01)
    deployment = Deployment((LocalNodes(3, bent, H20_DECODE),), (), CASE_STUDY_KV, 1024)
    lengths = observed(1000, 3000)
    point, mean = (divide(deployment, lengths, inf, reading).short_s for reading in BOTH)
    assert point == pytest.approx((0.04,))
    assert mean == pytest.approx((0.05,))


def test_clusters_and_kinds_add_up() -> None:
    two = replace(
        site(),
        clusters=(
            PrefillCluster("a", (PrefillNodes(1, H200), PrefillNodes(2, H20)), inf),
            PrefillCluster("b", (PrefillNodes(3, H200),), 1e8),
        ),
    )
    demand = divide(two, PAPER, 20_000, Reading.MEAN_SERVICE)
    a, b = demand.remote
    one_h200 = divide(site(remote=1), PAPER, 20_000, Reading.MEAN_SERVICE).remote[0].compute
    assert a.compute == pytest.approx(sum(a.kinds))
    assert a.kinds[0] == pytest.approx(one_h200)
    assert b.theta == b.link < b.compute
    assert demand.link_bound
    assert demand.theta_prfaas == pytest.approx(a.compute + b.link)


@pytest.mark.parametrize("prefill", [(-1,), (9,), (1, 1), ()])
def test_a_split_that_does_not_exist_is_refused(prefill: tuple[int, ...]) -> None:
    demand = divide(site(), PAPER, 20_000, Reading.POINT)
    with pytest.raises(ValueError, match="prefill"):
        rates(site(), demand, prefill)


def test_a_deployment_without_local_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="local"):
        replace(site(), local=())


@given(t=st.floats(1, 2e5), n_p=st.integers(0, 8), gbps=st.floats(0.5, 200))
@settings(max_examples=60)
def test_the_mean_service_reading_is_never_above_the_point_reading(t: float, n_p: int, gbps: float) -> None:
    deployment = site(gbps=gbps)
    point, mean = (rates(deployment, divide(deployment, PAPER, t, r), (n_p,)).lambda_max for r in BOTH)
    assert mean <= point * (1 + 1e-9)


@given(tokens=st.integers(1, 2**20), t=st.floats(0, 2**20), n_p=st.integers(0, 8))
@settings(max_examples=60)
def test_both_readings_agree_where_all_prompts_are_equally_long(tokens: int, t: float, n_p: int) -> None:
    lengths = observed(tokens, tokens)
    point, mean = (rates(site(), divide(site(), lengths, t, r), (n_p,)).lambda_max for r in BOTH)
    assert mean == pytest.approx(point, rel=1e-9)


prompts = st.lists(st.integers(50, 200_000), min_size=1, max_size=12)
sizes = st.tuples(st.integers(0, 4), st.integers(1, 5), st.floats(0.5, 50))


def distributions() -> st.SearchStrategy[LengthDistribution]:
    smooth = st.builds(TruncatedLogNormal, st.floats(7, 11), st.floats(0.3, 1.5), st.just(128), st.just(131_072))
    return st.one_of(smooth, prompts.map(lambda lengths: observed(*lengths)))


@given(lengths=distributions(), size=sizes, which=st.sampled_from(["remote", "local"]), reading=st.sampled_from(BOTH))
@settings(max_examples=15, deadline=None)
def test_more_nodes_never_lower_lambda_max(
    lengths: LengthDistribution, size: tuple[int, int, float], which: str, reading: Reading
) -> None:
    remote, local, gbps = size
    grown = site(remote + (which == "remote"), local + (which == "local"), gbps)
    before = SplitSearch(site(remote, local, gbps), lengths, reading)
    after = SplitSearch(grown, lengths, reading)
    assert after.split().lambda_max >= before.split().lambda_max * (1 - SEARCH_REL)
    assert after.fractional().lambda_max >= before.fractional().lambda_max * (1 - SEARCH_REL)


@given(lengths=distributions(), n_p=st.integers(0, 4), links=st.tuples(st.floats(0.2, 50), st.floats(0.2, 50)))
@settings(max_examples=15, deadline=None)
def test_a_narrower_link_never_lowers_the_threshold(
    lengths: LengthDistribution, n_p: int, links: tuple[float, float]
) -> None:
    narrow, wide = (SplitSearch(site(2, 4, gbps), lengths, Reading.MEAN_SERVICE) for gbps in (min(links), max(links)))
    assert narrow.threshold((n_p,)).demand.t >= wide.threshold((n_p,)).demand.t * (1 - SEARCH_REL)
    assert narrow.split().demand.t >= wide.split().demand.t * (1 - SEARCH_REL)
    assert narrow.split().lambda_max <= wide.split().lambda_max * (1 + SEARCH_REL)
