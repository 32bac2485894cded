"""Placement: one cost, three policies, and the cheapest of them on four kinds of skew."""

from __future__ import annotations

import json
import random

import pytest

from scheduler.placement.evaluate import Evaluation, evaluate
from scheduler.placement.fleet import Fleet, Work, cost
from scheduler.placement.policies import SINGLE, Policy, place
from scheduler.placement.statistics import ExpertStatistics
from scheduler.placement.trace import Arrivals, Skew, made_up, read

FLEET = Fleet((0, 0, 1, 1), (0, 1, 2, 3), 450e9, 50e9)
"""Two domains of two GPUs, an expert on each."""
EVEN = (1.0, 1.0, 1.0, 1.0)
IDLE = [0.0] * 4
WIDE = Fleet(tuple(gpu // 4 for gpu in range(16)), tuple(expert % 16 for expert in range(32)), 450e9, 50e9)


def work(experts: tuple[float, ...] = EVEN, kv: float = 45e9, exchange: float = 450e9, cached_on: int = 0) -> Work:
    return Work(kv, cached_on, exchange, experts)


def test_the_cost_is_transfer_and_exchange_and_queue() -> None:
    loads = FLEET.domain_loads((3.0, 0.0, 1.0, 0.0))
    assert loads == {0: 0.75, 1: 0.25}
    here, beside, away = (cost(FLEET, work(), gpu, 2.0, loads) for gpu in (0, 1, 2))
    assert (here.kv_s, beside.kv_s, away.kv_s) == (0.0, pytest.approx(0.1), pytest.approx(0.9))
    assert here.exchange_s == pytest.approx(0.75 * 1.0 + 0.25 * 9.0)
    assert away.exchange_s == pytest.approx(0.25 * 1.0 + 0.75 * 9.0)
    assert away.seconds == pytest.approx(0.9 + 7.0 + 2.0)


def test_each_policy_follows_its_one_thought() -> None:
    far = work((0.0, 0.0, 5.0, 5.0))
    queues = [0.0, 0.0, 3.0, 1.0]
    assert place(FLEET, far, queues, EVEN, Policy.CACHE).chosen.gpu == 0
    assert place(FLEET, far, queues, EVEN, Policy.DOMAIN).chosen.gpu == 3
    assert place(FLEET, far, queues, EVEN, Policy.SPLIT).chosen.gpu == 0, "the other domain waits longer"
    assert place(FLEET, far, [9.0, 9.0, 3.0, 1.0], EVEN, Policy.SPLIT).chosen.gpu == 3


def test_load_is_split_by_what_each_domains_experts_get() -> None:
    busy = [1.0, 1.0, 2.0, 2.0]
    assert place(FLEET, work(), busy, (1.0, 1.0, 1.0, 1.0), Policy.SPLIT).chosen.gpu < 2
    assert place(FLEET, work(), busy, (1.0, 1.0, 8.0, 8.0), Policy.SPLIT).chosen.gpu >= 2


def test_auto_takes_the_cheapest_and_says_whose_thought_it_was() -> None:
    far = (0.0, 0.0, 5.0, 5.0)
    for one, by in (
        (work(far, kv=1e9), Policy.DOMAIN),
        (work(far, kv=900e9, exchange=1e9), Policy.CACHE),
    ):
        placement = place(FLEET, one, IDLE, EVEN)
        assert placement.by is by
        assert placement.chosen.seconds == min(each.seconds for each in placement.proposals.values())
        assert set(placement.proposals) == set(SINGLE)
    waiting = place(FLEET, work(kv=1e9, exchange=1e9), [9.0, 9.0, 0.0, 0.0], EVEN)
    assert waiting.chosen.gpu >= 2


def test_statistics_forget() -> None:
    seen = ExpertStatistics(2, half_life=1.0)
    for _ in range(20):
        seen.observe((8.0, 0.0))
    seen.observe((0.0, 16.0))
    assert seen.tokens[1] > seen.tokens[0]
    with pytest.raises(ValueError, match="2 experts"):
        seen.observe((1.0,))


@pytest.fixture(scope="module")
def compared() -> dict[Skew, dict[Policy, Evaluation]]:
    return {
        skew: {
            policy: evaluate(WIDE, made_up(skew, WIDE, Arrivals(120.0, 150), random.Random(7)), policy)
            for policy in Policy
        }
        for skew in Skew
    }


@pytest.mark.parametrize("skew", Skew)
def test_auto_is_within_two_per_cent_of_the_best_single_policy(
    compared: dict[Skew, dict[Policy, Evaluation]], skew: Skew
) -> None:
    best = min(compared[skew][policy].mean_s for policy in SINGLE)
    assert compared[skew][Policy.AUTO].mean_s <= best * 1.02


@pytest.mark.parametrize("single", SINGLE)
def test_auto_beats_each_single_policy_somewhere(
    compared: dict[Skew, dict[Policy, Evaluation]], single: Policy
) -> None:
    assert any(found[Policy.AUTO].mean_s < found[single].mean_s * 0.9 for found in compared.values())


def test_no_single_policy_is_best_everywhere(compared: dict[Skew, dict[Policy, Evaluation]]) -> None:
    best = {min(SINGLE, key=lambda policy: found[policy].mean_s) for found in compared.values()}
    assert len(best) > 1


def test_parts_add_up_and_a_trace_is_the_same_for_a_seed(compared: dict[Skew, dict[Policy, Evaluation]]) -> None:
    for found in compared.values():
        for one in found.values():
            assert one.kv_s + one.exchange_s + one.queue_s == pytest.approx(one.mean_s)
            assert sum(one.by.values()) == 150
    again = [made_up(Skew.FEW, FLEET, Arrivals(5.0, 4), random.Random(3)) for _ in range(2)]
    assert again[0] == again[1]


LINE = {"at_s": 1.0, "prompt_tokens": 100, "output_tokens": 10, "cached_on": 2, "experts": [1, 2, 3, 4]}


def lines(*changes: dict[str, object]) -> list[bytes]:
    return [json.dumps({**LINE, **change}).encode() for change in changes]


def test_a_trace_is_read_from_lines() -> None:
    found = read([*lines({}, {"at_s": 2.0, "answer_experts": [4, 3, 2, 1]}), b"\n"], FLEET)
    assert [request.at_s for request in found] == [1.0, 2.0]
    assert found[1].answer_experts == (4.0, 3.0, 2.0, 1.0)
    assert evaluate(FLEET, found, Policy.AUTO).mean_s > 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"at_s": 0.5}, "at_s"),
        ({"cached_on": 4}, "cached_on"),
        ({"experts": [1]}, "experts"),
        ({"experts": [1, 1, 1, -1]}, "experts"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"prompt_tokens": "x"}, "prompt_tokens"),
    ],
)
def test_a_line_that_cannot_be_so_is_named(change: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: .*{word}"):
        read(lines({}, change), FLEET)


def test_an_empty_trace_and_an_impossible_fleet_are_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        read([], FLEET)
    with pytest.raises(ValueError, match="no requests"):
        evaluate(FLEET, [], Policy.AUTO)
    with pytest.raises(ValueError, match="gpu_of"):
        Fleet((0,), (1,), 1.0, 1.0)
    with pytest.raises(ValueError, match="rates"):
        Fleet((0,), (0,), 1.0, 0.0)
    with pytest.raises(ValueError, match="queues_s"):
        place(FLEET, work(), [0.0], EVEN)
