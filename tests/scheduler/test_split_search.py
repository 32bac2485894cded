"""The search: equation 7 holds where it stops, nothing untried is better, and roles divide as they should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.lengths import TruncatedLogNormal
from scheduler.observed_lengths import LengthHistogram
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200, DecodeProfile, PrefillProfile
from scheduler.split_search import SplitSearch
from scheduler.throughput import Deployment, LocalNodes, PrefillCluster, PrefillNodes, Reading

PAPER = TruncatedLogNormal(9.90, 1.00, 128, 131_072)
H20_NODES = LocalNodes(8, H20, H20_DECODE)
REMOTE = PrefillCluster("remote", (PrefillNodes(4, H200),), 12.5e9)


def search(*local: LocalNodes, remote: bool = True, reading: Reading = Reading.MEAN_SERVICE) -> SplitSearch:
    clusters = (REMOTE,) if remote else ()
    return SplitSearch(Deployment(local or (H20_NODES,), clusters, CASE_STUDY_KV, 1024), PAPER, reading)


@pytest.mark.parametrize("reading", list(Reading))
@pytest.mark.parametrize("n_p", [1, 3, 6])
def test_both_prefill_sides_are_full_together_at_the_best_threshold(n_p: int, reading: Reading) -> None:
    found = search(reading=reading).threshold((n_p,))
    p = found.demand.p
    assert found.demand.theta_prfaas / p == pytest.approx(found.theta_pdp / (1 - p), rel=1e-6)


def test_no_threshold_and_split_beats_the_search() -> None:
    looked = search()
    best, bound = looked.split().lambda_max, looked.fractional().lambda_max
    assert best <= bound * (1 + 1e-9)

    @given(t=st.floats(1, 140_000), n_p=st.integers(0, 8))
    @settings(max_examples=100)
    def every_other_point(t: float, n_p: int) -> None:
        assert looked.at(t, (n_p,)).lambda_max <= best * (1 + 1e-6)

    every_other_point()


def test_fractional_roles_fill_all_three_stages() -> None:
    found = search().fractional()
    p = found.demand.p
    assert found.demand.theta_prfaas / p == pytest.approx(found.theta_pdd, rel=1e-5)
    assert found.theta_pdp / (1 - p) == pytest.approx(found.theta_pdd, rel=1e-5)
    assert found.n_p + found.n_d == pytest.approx(8)


def test_without_remote_clusters_nothing_is_offloaded() -> None:
    found = search(remote=False).split()
    assert found.demand.p == 0
    assert found.demand.remote == ()
    assert found.lambda_max > 0


def test_with_no_local_prefill_everything_is_offloaded() -> None:
    found = search().threshold((0,))
    assert found.demand.p == 1
    assert found.lambda_max == pytest.approx(found.demand.theta_prfaas)


def test_a_second_kind_of_the_same_nodes_changes_nothing() -> None:
    halves = search(LocalNodes(4, H20, H20_DECODE), LocalNodes(4, H20, H20_DECODE))
    assert halves.split().lambda_max == pytest.approx(search().split().lambda_max)
    assert halves.fractional().lambda_max == pytest.approx(search().fractional().lambda_max)


def test_each_kind_takes_the_role_that_it_is_better_at() -> None:
    computes = LocalNodes(3, H200, DecodeProfile(batch=5, step_s=0.025))
    speaks = LocalNodes(5, PrefillProfile("slow", 1.0, 0.5, 1e-3), DecodeProfile(batch=30, step_s=0.025))
    for order in ((computes, speaks), (speaks, computes)):
        looked = search(*order)
        fractional = dict(zip((n.prefill.name for n in order), looked.fractional().prefill, strict=True))
        assert fractional["8 x H200"] > 0
        assert fractional["slow"] == 0 or fractional["8 x H200"] == 3
        assert looked.split().lambda_max <= looked.fractional().lambda_max * (1 + 1e-9)


def test_the_threshold_follows_observed_traffic() -> None:
    def best(scale: float) -> float:
        histogram = LengthHistogram(half_life_s=1e9)
        for i in range(400):
            histogram.add(round(PAPER.quantile((i + 0.5) / 400) * scale), now=0.0)
        seen = histogram.snapshot()
        assert seen is not None
        deployment = Deployment((H20_NODES,), (REMOTE,), CASE_STUDY_KV, 1024)
        return SplitSearch(deployment, seen, Reading.MEAN_SERVICE).threshold((3,)).demand.t

    assert best(1.0) == pytest.approx(19_476, rel=0.04)
    assert best(0.3) < best(1.0) < best(3.0)
