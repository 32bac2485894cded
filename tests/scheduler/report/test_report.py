"""The report's figures, against traffic whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from math import isinf

import msgspec
import numpy as np
import pytest

from scheduler.controller.settings import ControllerSettings
from scheduler.controller.traffic import binned
from scheduler.facts import Prices
from scheduler.operating_point import FleetModel
from scheduler.report.capacity import Advice, CapacityView
from scheduler.report.conversions import Converted
from scheduler.report.egress import Site
from scheduler.report.latency import Goals
from scheduler.report.report import Report, make_report
from scheduler.report.requests import Served, Shipment
from scheduler.split_search import SplitSearch
from scheduler.throughput import Reading
from tests.scheduler.report.windows import SINCE, fleet, inputs, served


def capacity(report: Report) -> CapacityView:
    assert report.capacity is not None, report.unknown
    return report.capacity


def few(count: int, **changes: object) -> list[Served]:
    plain = Served(SINCE, 1001, 1000, finished=True, ttft_s=1.0, tpot_s=0.025, cached_tokens=0, output_tokens=1024)
    return [msgspec.structs.replace(plain, at=SINCE + i, **changes) for i in range(count)]


def test_the_case_study_at_its_published_point_is_left_alone() -> None:
    found = capacity(make_report(inputs()))
    assert found.advice is Advice.KEEP
    assert found.now.lambda_max == pytest.approx(3.219, rel=0.01)
    assert found.now.lambda_point >= found.now.lambda_max
    assert [stage.name for stage in found.stages if stage.full_at == found.now.lambda_max] == [found.bottleneck]
    assert {stage.name: stage.nodes for stage in found.stages} == {
        "prefill at home": 3,
        "prefill in clusters": 4,
        "decode": 5,
    }


def test_a_bad_split_is_to_be_changed_and_the_gain_lies_in_its_interval() -> None:
    found = capacity(make_report(inputs(seen=fleet(5, threshold=9000.0))))
    assert found.advice is Advice.REBALANCE
    assert found.bottleneck == "decode"
    assert sum(found.best.prefill) in (3, 4)
    assert found.gain_low <= found.gain <= found.gain_high
    assert found.gain == pytest.approx(found.best.lambda_max / found.now.lambda_max)
    assert found.better == 1.0


def test_a_bad_threshold_alone_asks_for_another_threshold() -> None:
    found = capacity(make_report(inputs(seen=fleet(3, threshold=60_000.0))))
    assert found.advice in (Advice.RETUNE, Advice.REBALANCE)
    assert found.tuned.prefill == found.now.prefill
    assert found.tuned.lambda_max > 1.3 * found.now.lambda_max


def test_fewer_requests_leave_more_open() -> None:
    def width(count: int) -> float:
        found = capacity(make_report(inputs(served(count), fleet(5, threshold=15_000.0))))
        return found.gain_high - found.gain_low

    assert width(200) > 2 * width(5000)


def test_what_few_requests_leave_open_is_not_proposed() -> None:
    careful = ControllerSettings(start_gain=1.0, carry_on_gain=1.0)
    found = capacity(make_report(inputs(served(100), fleet(3, threshold=19_400.0), careful)))
    assert found.gain_low < 1 <= found.gain
    assert found.advice is Advice.UNSURE


def test_the_surface_is_the_throughput_models() -> None:
    found = capacity(make_report(inputs()))
    assert found.surface.prefill == tuple(range(8))
    most = max(value for row in found.surface.values for value in row)
    peak = max(value for _, value in found.surface.peaks)
    assert most <= peak * (1 + 1e-9)
    assert peak == pytest.approx(found.best.lambda_max)
    for row, (_, best) in zip(found.surface.values, found.surface.peaks, strict=True):
        assert max(row) <= best * (1 + 1e-9)


def test_the_best_point_is_what_an_exhaustive_search_finds() -> None:
    given = inputs(seen=fleet(5, threshold=9000.0))
    found = capacity(make_report(given))
    lengths = binned(np.asarray([float(one.uncached_tokens) for one in given.requests]))
    assert given.seen is not None
    deployment = FleetModel(given.seen, lengths, found.output_tokens).deployment(found.output_tokens)
    searched = SplitSearch(deployment, lengths, Reading.MEAN_SERVICE).split()
    assert found.best.lambda_max == pytest.approx(searched.lambda_max, rel=1e-3)


def test_without_remote_clusters_every_prompt_stays_whatever_the_threshold() -> None:
    found = capacity(make_report(inputs(seen=fleet(remote=0))))
    assert isinf(found.now.threshold)
    assert found.now.offloaded == 0
    assert found.now.lambda_max > 0
    assert isinf(next(stage.full_at for stage in found.stages if stage.name == "prefill in clusters"))


def test_without_local_prefill_every_prompt_leaves() -> None:
    found = capacity(make_report(inputs(seen=fleet(prefill=0))))
    assert (found.now.threshold, found.now.offloaded) == (0.0, 1.0)


def test_too_little_is_said_to_be_too_little() -> None:
    nothing = make_report(inputs([]))
    assert (nothing.traffic, nothing.capacity, nothing.latency, nothing.slo) == (None, None, None, None)
    assert "0 requests" in nothing.unknown[0]
    a_few = make_report(inputs(few(30)))
    assert a_few.capacity is None
    assert any("30 requests had something to prefill; below 64" in sentence for sentence in a_few.unknown)
    silent = make_report(inputs(few(80, output_tokens=None, finished=False)))
    assert any("0 answers have ended" in sentence for sentence in silent.unknown)
    unseen = make_report(replace(inputs(), seen=None))
    assert unseen.capacity is None
    assert unseen.latency is not None
    assert any("how fast it prefills" in sentence for sentence in unseen.unknown)


def test_who_had_no_first_token_waited_for_ever() -> None:
    requests = few(90) + few(10, ttft_s=None, finished=False)
    report = make_report(replace(inputs(requests), goals=Goals(tpot_s=0.025)))
    assert report.latency is not None
    assert report.slo is not None
    assert (report.latency.p50, report.latency.p99, report.latency.unanswered) == (1.0, float("inf"), 10)
    assert report.slo.ttft == pytest.approx(0.9)
    assert report.slo.both == pytest.approx(0.9)


def test_the_slo_is_the_stated_one() -> None:
    # the quickest node needs 0.4345 s for these 1000 tokens: 2 s + 3 T is 3.303 s
    within, beyond = few(50, ttft_s=3.30), few(50, ttft_s=3.31)
    report = make_report(inputs(within + beyond))
    assert report.slo is not None
    assert (report.slo.quickest, report.slo.ttft, report.slo.tpot) == ("8 x H200", 0.5, None)
    assert any("output token" in sentence for sentence in report.unknown)
    slow = few(50, tpot_s=0.0265)
    judged = make_report(replace(inputs(few(50) + slow), goals=Goals(tpot_s=0.025)))
    assert judged.slo is not None
    assert (judged.slo.ttft, judged.slo.tpot, judged.slo.both) == (1.0, 0.5, 0.5)
    with pytest.raises(ValueError, match="ttft_factor must be positive"):
        Goals(ttft_factor=0)


def test_egress_and_price_are_those_of_the_hour() -> None:
    night = tuple(0.5 if hour < 6 else 1.0 for hour in range(24))
    day_s, night_s = SINCE // 86_400 * 86_400 + 43_200, SINCE // 86_400 * 86_400 + 3_600
    one = few(1, shipments=(Shipment("east", 10.0, 2_000_000_000),))[0]
    sites = (Site("east", False, Prices(0.02, 0.01, night), 1e9, 5e8),)

    def cost(at: float) -> float:
        requests = [msgspec.structs.replace(one, at=at)]
        report = make_report(replace(inputs(requests), since=at - 1, until=at + 99, sites=sites))
        use = report.egress.clusters[0]
        assert (use.requests, use.gigabytes, use.mean_gbps) == (1, 2.0, pytest.approx(0.16))
        assert (use.link_gbps, use.limit_gbps, use.capacity_gbps) == (8.0, 4.0, 4.0)
        return use.cost

    assert cost(day_s) == pytest.approx(2 * 0.02 + 10 * 0.01)
    assert cost(night_s) == pytest.approx((2 * 0.02 + 10 * 0.01) / 2)


def test_what_stays_at_home_costs_no_egress_and_a_cluster_that_left_is_counted() -> None:
    home = few(10, shipments=(Shipment("local", 1.0, 1_000_000),))
    gone = few(10, shipments=(Shipment("west", 1.0, 1_000_000),))
    sites = (Site("local", True, Prices(egress_per_gb=1000.0)),)
    report = make_report(replace(inputs(home + gone), sites=sites))
    uses = {use.name: use for use in report.egress.clusters}
    assert (uses["local"].cost, uses["west"].requests, uses["west"].priced) == (0.0, 10, False)


def test_before_and_after_a_conversion_are_told_apart() -> None:
    began, ended = SINCE + 300, SINCE + 330
    slow = [msgspec.structs.replace(one, at=SINCE + i * 5, ttft_s=8.0) for i, one in enumerate(few(60))]
    quick = [msgspec.structs.replace(one, at=ended + i * 5, ttft_s=2.0) for i, one in enumerate(few(60))]
    change = Converted(1, "n", "decode", "prefill", began, ended, "done", "ann", "more")
    given = replace(inputs(slow + quick), conversions=(change,), until=ended + 300)
    (effect,) = make_report(given).conversions
    assert effect.before is not None
    assert effect.after is not None
    assert (effect.before.ttft_p50_s, effect.after.ttft_p50_s) == (8.0, 2.0)
    assert effect.before.offered_req_s == pytest.approx(0.2)
    # the next one begins at once: nothing can be said of what this one brought
    other = msgspec.structs.replace(change, number=2, began=ended + 10, ended=ended + 20)
    first, _ = make_report(replace(given, conversions=(change, other))).conversions
    assert first.after is None


def test_bars_are_closed_above_as_a_threshold_is() -> None:
    report = make_report(inputs(few(5, uncached_tokens=1024) + few(5, uncached_tokens=1025)))
    assert report.traffic is not None
    uncached = report.traffic.uncached
    assert uncached is not None
    at = uncached.edges.index(1024.0)
    assert (uncached.counts[at - 1], uncached.counts[at]) == (5, 5)
    assert sum(uncached.counts) == uncached.count == 10


def test_the_same_inputs_give_the_same_report() -> None:
    given = inputs(served(300), fleet(5, threshold=15_000.0))
    assert msgspec.json.encode(make_report(given)) == msgspec.json.encode(make_report(given))
    assert make_report(given).capacity != make_report(replace(given, seed=1)).capacity
