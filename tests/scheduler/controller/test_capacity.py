"""The running sums give what the exhaustive search gives."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.controller.capacity import Capacities
from scheduler.controller.observation import Kind
from scheduler.observed_lengths import LengthHistogram, ObservedLengths
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200, DecodeProfile
from scheduler.split_search import SplitSearch
from scheduler.throughput import Deployment, LocalNodes, PrefillCluster, PrefillNodes, Reading

KINDS = (Kind("h20", H20, H20_DECODE), Kind("h200", H200, DecodeProfile(20, 0.02)))


def observed(seed: int, count: int = 600) -> ObservedLengths:
    histogram = LengthHistogram(1e9)
    for tokens in np.exp(np.random.default_rng(seed).normal(9.5, 1.0, count)):
        histogram.add(max(1, int(tokens)), 0.0)
    found = histogram.snapshot()
    assert found is not None
    return found


@pytest.mark.parametrize("egress", [float("inf"), 3e8])
@pytest.mark.parametrize("counts", [(8, 0), (3, 2)])
def test_every_split_has_the_capacity_that_the_search_finds(egress: float, counts: tuple[int, int]) -> None:
    clusters = (
        PrefillCluster("east", (PrefillNodes(4, H200),), egress),
        PrefillCluster("west", (PrefillNodes(1, H20),)),
    )
    lengths = observed(1)
    fleet = Capacities(KINDS, counts, clusters, CASE_STUDY_KV, lengths)
    local = tuple(LocalNodes(n, kind.prefill, kind.decode) for n, kind in zip(counts, KINDS, strict=True))
    search = SplitSearch(Deployment(local, clusters, CASE_STUDY_KV, 700.0), lengths, Reading.MEAN_SERVICE)
    for found in search.splits():
        split = tuple(int(n) for n in found.prefill)
        assert fleet.lambda_max(split, 700.0) == pytest.approx(found.lambda_max, rel=1e-9)
        limit, threshold = fleet.prefill(split)
        assert search.at(threshold, split).prefill_limit == pytest.approx(limit, rel=1e-9)
    best = search.split()
    assert fleet.lambda_max(fleet.best(700.0, (0, 0)), 700.0) == pytest.approx(best.lambda_max, rel=1e-9)


def test_without_a_cluster_all_prompts_stay_and_without_a_prefill_node_none_does() -> None:
    lengths = observed(2)
    alone = Capacities(KINDS[:1], (4,), (), CASE_STUDY_KV, lengths)
    assert alone.prefill((2,))[1] == lengths.thresholds()[-1]
    assert alone.prefill((0,))[0] == 0.0
    with_east = Capacities(KINDS[:1], (4,), (PrefillCluster("e", (PrefillNodes(1, H200),)),), CASE_STUDY_KV, lengths)
    assert with_east.prefill((0,))[1] == 0.0


def test_the_last_node_is_never_asked_to_prefill() -> None:
    fleet = Capacities(KINDS[:1], (1,), (), CASE_STUDY_KV, observed(3))
    assert fleet.best(1.0, (0,)) == (0,)
    with pytest.raises(ValueError, match="no local node"):
        Capacities(KINDS[:1], (0,), (), CASE_STUDY_KV, observed(3)).best(1.0, (0,))


def test_a_fleet_of_too_many_splits_is_searched_around_the_present_one() -> None:
    kinds = tuple(Kind(f"k{i}", H20, H20_DECODE) for i in range(4))
    fleet = Capacities(kinds, (30, 30, 30, 30), (), CASE_STUDY_KV, observed(4, 50))
    assert fleet.lambda_max(fleet.best(1024.0, (5, 5, 5, 5)), 1024.0) > fleet.lambda_max((5, 5, 5, 5), 1024.0)
