"""A decode node alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial

import numpy as np
import pytest

from scheduler.facts import PrefillCurve
from scheduler.simulator.clock import Clock
from scheduler.simulator.decode import DecodeNode
from scheduler.simulator.jobs import Job

CURVE = PrefillCurve(0.0, 1e-3)


class Listener:
    def __init__(self) -> None:
        self.began: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.computed: dict[int, float] = {}

    def stream_begins(self, job: Job, now: float, first_at: float) -> None:
        self.began[job.index], self.first[job.index] = now, first_at

    def stream_ends(self, node: DecodeNode, job: Job, now: float) -> None:
        self.ended[job.index] = now

    def computed_in_place(self, node: DecodeNode, job: Job, now: float) -> None:
        self.computed[job.index] = now


class Do:
    def __init__(self, what: object, job: Job) -> None:
        self.what, self.job = what, job

    def fire(self, now: float) -> None:
        self.what(self.job, now)  # type: ignore[operator]


def decode(
    requests: list[tuple[float, int]],
    step_s: list[float],
    prompts: Sequence[tuple[float, int]] = (),
    chunk_s: float = 0.0,
) -> Listener:
    clock, listener = Clock(), Listener()
    node = DecodeNode("d", step_s, CURVE, clock, listener, chunk_s)
    for index, (at, output) in enumerate(requests):
        node.assigned += 1
        clock.at(at, Do(node.ready, Job(index, at, 1, output, ())))
    for index, (at, tokens) in enumerate(prompts):
        clock.at(at, Do(node.mix, Job(100 + index, at, tokens, 1, ())))
    clock.run()
    assert node.idle
    return listener


def test_a_stream_gets_a_token_a_step() -> None:
    found = decode([(1.0, 100)], [0.01] * 5)
    assert found.first == {0: pytest.approx(1.01)}
    assert found.ended == {0: pytest.approx(2.0)}


def test_who_finds_the_batch_full_waits_for_a_slot() -> None:
    found = decode([(0.0, 100), (0.0, 100), (0.5, 100)], [0.01] * 3)
    assert found.first[2] == pytest.approx(1.01)
    assert found.ended == pytest.approx({0: 1.0, 1: 1.0, 2: 2.0})


def test_steps_that_take_longer_with_more_streams_slow_all_of_them() -> None:
    found = decode([(0.0, 100), (0.5, 100)], [0.01, 0.01, 0.02])
    # 50 steps alone, then 50 together at half the pace, then the second alone again
    assert found.ended == pytest.approx({0: 1.5, 1: 2.0})


def test_a_shorter_answer_that_comes_later_may_end_first() -> None:
    found = decode([(0.0, 100), (0.1, 10), (0.1, 10)], [0.01] * 5)
    assert found.ended == pytest.approx({1: 0.2, 2: 0.2, 0: 1.0})


def test_prompts_in_between_make_steps_longer_and_take_what_they_are_given() -> None:
    found = decode([(0.0, 200)], [0.03] * 5, prompts=[(0.3, 100)], chunk_s=0.01)
    # 10 steps; then a quarter of each step of 40 ms is the prompt's, so it takes 0.4 s: 10 steps more; 180 are left
    assert found.computed == {100: pytest.approx(0.7)}
    assert found.ended == {0: pytest.approx(0.7 + 180 * 0.03)}


def test_an_idle_node_computes_a_prompt_at_full_speed_one_after_the_other() -> None:
    found = decode([], [0.03] * 5, prompts=[(0.0, 100), (0.05, 200)], chunk_s=0.01)
    assert found.computed == pytest.approx({100: 0.1, 101: 0.3})


def test_the_mean_wait_for_a_slot_is_that_of_an_m_m_c_queue() -> None:
    slots, load, count, mean = 5, 0.6, 30_000, 200
    rng = np.random.default_rng(3)
    arrived = np.cumsum(rng.exponential(mean * 0.01 / (slots * load), count))
    outputs = np.maximum(1, np.rint(rng.exponential(mean, count))).astype(int)
    found = decode(list(zip(arrived.tolist(), outputs.tolist(), strict=True)), [0.01] * (slots + 1))
    wait = np.mean([found.began[index] - at for index, at in enumerate(arrived)])
    offered = slots * load
    last = offered**slots / factorial(slots) / (1 - load)
    erlang_c = last / (sum(offered**n / factorial(n) for n in range(slots)) + last)
    assert wait == pytest.approx(erlang_c * mean * 0.01 / (slots * (1 - load)), rel=0.08)
