"""Service times without queueing, against counting prompts one by one."""

from __future__ import annotations

from math import inf

import pytest

from scheduler.lengths import TruncatedLogNormal
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200, PrefillProfile
from scheduler.service_times import service_times
from scheduler.split_search import SplitSearch
from scheduler.throughput import Deployment, LocalNodes, PrefillCluster, PrefillNodes, Reading

PAPER = TruncatedLogNormal(9.90, 1.00, 128, 131_072)
STRATA = [PAPER.quantile((i + 0.5) / 20_000) for i in range(20_000)]


def deployment(egress_bytes_per_s: float = inf, *kinds: PrefillNodes) -> Deployment:
    cluster = PrefillCluster("remote", kinds or (PrefillNodes(4, H200),), egress_bytes_per_s)
    return Deployment((LocalNodes(8, H20, H20_DECODE),), (cluster,), CASE_STUDY_KV, 1024)


@pytest.mark.parametrize("egress", [inf, 1e8])
@pytest.mark.parametrize("t", [0.0, 8000.0, 19_400.0, 100_000.0])
def test_mean_and_percentile_are_those_of_a_stratified_sample(t: float, egress: float) -> None:
    site = deployment(egress)
    found = service_times(site, PAPER, SplitSearch(site, PAPER, Reading.MEAN_SERVICE).at(t, (3,)))
    times = sorted(
        max(H200.seconds(tokens), CASE_STUDY_KV.nbytes(tokens) / egress) if tokens > t else H20.seconds(tokens)
        for tokens in STRATA
    )
    assert found.mean_s == pytest.approx(sum(times) / len(times), rel=1e-3)
    assert found.p90_s == pytest.approx(times[len(times) * 9 // 10], rel=1e-3)


def test_kinds_in_a_cluster_share_prompts_by_their_speed() -> None:
    slow = PrefillProfile("slow", H200.c0_s * 2, H200.c1_s * 2, H200.c2_s * 2)
    site = deployment(inf, PrefillNodes(2, H200), PrefillNodes(2, slow))
    found = service_times(site, PAPER, SplitSearch(site, PAPER, Reading.MEAN_SERVICE).at(0.0, (0,)))
    one = deployment()
    alone = service_times(one, PAPER, SplitSearch(one, PAPER, Reading.MEAN_SERVICE).at(0.0, (0,)))
    # two thirds of the prompts go to the fast pair, one third takes twice as long
    assert found.mean_s == pytest.approx(alone.mean_s * 4 / 3, rel=1e-9)
    assert found.p90_s > alone.p90_s


def test_a_class_that_nothing_serves_has_no_time() -> None:
    site = deployment()
    point = SplitSearch(site, PAPER, Reading.POINT).at(19_400, (0,))
    with pytest.raises(ValueError, match="no local node prefills"):
        service_times(site, PAPER, point)
