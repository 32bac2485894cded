"""The way of a request through a small fleet."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest

from kvcache.quality import Quality
from scheduler.case_study import LENGTHS
from scheduler.facts import CodecFacts, PrefillCurve, SizeFacts
from scheduler.policy import RoutingPolicy
from scheduler.simulator.arrivals import Arrivals, synthetic
from scheduler.simulator.baselines import Static
from scheduler.simulator.fleet import Failure, LinkSpec, Settings
from scheduler.simulator.orders import Order, Ordering
from scheduler.simulator.prefixes import StoreSpec
from scheduler.simulator.presets import hybrid
from scheduler.simulator.run import simulate
from scheduler.values import PolicyValues
from tests.scheduler.simulator.fleets import RAW, fleet, run, traffic


def test_the_first_token_comes_a_step_after_prefill_and_the_last_when_all_steps_are_done() -> None:
    done = run(fleet(), traffic([1.0], [500], 10)).records
    assert done.first_at == [pytest.approx(1.51)]
    assert done.done_at == [pytest.approx(1.6)]


def test_a_long_prompt_goes_away_and_a_short_one_stays() -> None:
    found = run(fleet(remote=1), traffic([0.0, 0.0], [500, 2000]), threshold=1000).records
    assert list(found.remote) == [0, 1]
    assert found.first_at == pytest.approx([0.51, 1.01])
    assert found.wire_bytes == [500_000, 2_000_000]


def test_a_round_trip_is_part_of_a_remote_way() -> None:
    where = fleet(remote=1, link=LinkSpec(1e9, rtt_s=0.2))
    assert run(where, traffic([0.0], [2000]), threshold=1000).records.first_at == [pytest.approx(1.21)]


def test_on_a_slow_link_a_transfer_sets_the_time() -> None:
    where = fleet(remote=1, link=LinkSpec(1e5))
    assert run(where, traffic([0.0], [2000]), threshold=1000).records.first_at == [pytest.approx(20.01, abs=0.02)]


def test_a_fixed_state_is_sent_with_the_last_chunk() -> None:
    where = fleet(remote=1, link=LinkSpec(1e7), sizes=SizeFacts(per_token=1000, state=10_000_000))
    # 1.9 s of release, then 10.1 MB at 10 MB/s
    found = run(where, traffic([0.0], [2000]), threshold=1000).records.first_at
    assert found == [pytest.approx(0.95 + 1.01 + 0.01, abs=1e-3)]


def test_a_codec_sends_fewer_bytes_and_is_paid_for_in_time() -> None:
    codec = CodecFacts("lossless", Quality.EXACT, 0.5, 1e5, 1e9)
    where = fleet(remote=1, link=LinkSpec(1e5), codecs=(codec,))
    policy = Static(RoutingPolicy(PolicyValues(remote_codec="lossless")), 1000)
    found = simulate(where, Settings(0), policy, traffic([0.0], [2000])).records
    assert found.wire_bytes == [1_000_000]
    # 2 MB raw at 100 kB/s of encoding
    assert found.first_at == [pytest.approx(20.01, abs=0.02)]


def test_a_full_pool_holds_the_next_prompt_back() -> None:
    where = fleet(remote=1, link=LinkSpec(1e6), pool_bytes=2.5e6)
    found = run(where, traffic([0.0, 0.0], [2000, 2000]), threshold=1000).records.first_at
    # the second begins when the first has left, after 2 s, and is sent in another 2 s
    assert found == pytest.approx([2.01, 4.01], abs=0.01)
    both = run(fleet(remote=1, link=LinkSpec(1e6)), traffic([0.0, 0.0], [2000, 2000]), threshold=1000).records.first_at
    assert both == pytest.approx([3.01, 4.01], abs=0.01)


def test_a_prefix_that_is_kept_is_neither_computed_nor_sent_again() -> None:
    store = StoreSpec(block_tokens=100, block_bytes=100_000)
    blocks = (tuple(range(20)), (*range(15), 90, 91, 92, 93, 94))
    found = run(fleet(remote=1, store=store), traffic([0.0, 10.0], [2000, 2000], 1, blocks, 100), threshold=100).records
    assert found.cached_tokens == [0, 1500]
    assert found.first_at[1] == pytest.approx(10.0 + 0.25 + 0.01)
    assert found.wire_bytes == [2_000_000, 500_000]


def test_the_same_run_twice_is_the_same_to_the_last_bit() -> None:
    requests = synthetic(Arrivals(1500, 3.0), LENGTHS, 1024, seed=7)
    runs = [simulate(hybrid(3), Settings(0, Ordering(Order.AGED)), RAW, requests).records for _ in range(2)]
    assert runs[0].first_at == runs[1].first_at
    assert runs[0].done_at == runs[1].done_at
    assert runs[0].remote == runs[1].remote


@pytest.mark.parametrize("order", list(Order))
def test_every_request_is_answered_once_and_none_before_it_could_be(order: Order) -> None:
    requests = synthetic(Arrivals(1500, 3.0, cv=3.0), LENGTHS, 200, seed=3)
    found = simulate(hybrid(3), Settings(0, Ordering(order)), RAW, requests)
    first, done = np.array(found.records.first_at), np.array(found.records.done_at)
    assert found.records.failed == 0
    assert not any(isnan(at) for at in found.records.done_at)
    quickest = PrefillCurve(0.3934, 0.04104e-3, 1.003e-10)
    least = np.array([quickest.seconds(0, int(n) - 1) for n in requests.prompt_tokens])
    assert np.all(first - requests.arrival_s >= least)
    assert done - first == pytest.approx(np.full(len(first), 199 * 0.025))


def test_what_finds_no_decode_node_waits_for_one() -> None:
    settings = Settings(0, failures=(Failure(0.5, "m-1", 20.0),))
    found = run(fleet(), traffic([1.0], [500]), settings=settings).records
    assert found.first_at == [pytest.approx(20.51)]
