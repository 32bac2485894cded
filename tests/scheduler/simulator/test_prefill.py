"""A prefill node alone, against queueing theory."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.facts import PrefillCurve
from scheduler.simulator.clock import Clock
from scheduler.simulator.jobs import Job
from scheduler.simulator.orders import FIRST_COME, Order, Ordering
from scheduler.simulator.prefill import PrefillNode

CURVE = PrefillCurve(0.0, 1e-3)


class Listener:
    """Notes when prompts begin, pause and end."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []
        self.ended: dict[int, float] = {}
        self.nbytes = 0.0

    def prefill_begins(self, node: PrefillNode, job: Job, now: float) -> float:
        self.seen.append(("begins", job.index, now))
        return self.nbytes

    def prefill_pauses(self, job: Job, now: float) -> None:
        self.seen.append(("pauses", job.index, now))

    def prefill_resumes(self, job: Job, now: float) -> None:
        self.seen.append(("resumes", job.index, now))

    def prefill_ends(self, node: PrefillNode, job: Job, now: float) -> None:
        self.seen.append(("ends", job.index, now))
        self.ended[job.index] = now


class Comes:
    def __init__(self, node: PrefillNode, job: Job) -> None:
        self.node, self.job = node, job

    def fire(self, now: float) -> None:
        self.node.submit(self.job, now)


def serve(
    prompts: list[tuple[float, int]], ordering: Ordering = FIRST_COME, curve: PrefillCurve = CURVE, **more: float
) -> Listener:
    clock, listener = Clock(), Listener()
    node = PrefillNode("n", "local", curve, 100, ordering, clock, listener, **more)
    for index, (arrived, tokens) in enumerate(prompts):
        clock.at(arrived, Comes(node, Job(index, arrived, tokens, 1, ())))
    clock.run()
    assert node.queued_s(clock.now) == pytest.approx(0.0, abs=1e-6)
    assert node.queued_tokens == 0
    return listener


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_mean_wait_of_equal_prompts_is_that_of_an_m_d_1_queue(load: float) -> None:
    count, service_s = 30_000, 0.5
    arrived = np.cumsum(np.random.default_rng(1).exponential(service_s / load, count))
    ended = serve([(float(at), 500) for at in arrived]).ended
    wait = np.mean([ended[index] - at for index, at in enumerate(arrived)]) - service_s
    # Pollaczek-Khinchine, deterministic service
    assert wait == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)


def test_first_come_is_first_served_whatever_the_length() -> None:
    ended = serve([(0.0, 1000), (0.1, 900), (0.2, 10)]).ended
    assert [ended[index] for index in range(3)] == pytest.approx([1.0, 1.9, 1.91])


def test_a_shorter_prompt_goes_first_from_the_next_end_of_a_chunk() -> None:
    listener = serve([(0.0, 1000), (0.25, 50)], Ordering(Order.SRPT))
    assert [(what, index, pytest.approx(at)) for what, index, at in listener.seen] == [
        ("begins", 0, 0.0),
        ("pauses", 0, 0.3),
        ("begins", 1, 0.3),
        ("ends", 1, 0.35),
        ("resumes", 0, 0.35),
        ("ends", 0, 1.05),
    ]


def test_the_end_of_a_chunk_is_found_on_a_curve_that_bends() -> None:
    curve = PrefillCurve(0.5, 1e-3, 1e-6)
    listener = serve([(0.0, 1000), (1.0, 10)], Ordering(Order.SRPT), curve)
    at = next(at for what, _, at in listener.seen if what == "pauses")
    done = [curve.seconds(0, tokens) for tokens in range(100, 1000, 100)]
    assert at == pytest.approx(min(s for s in done if s >= 1.0))
    assert listener.ended[0] == pytest.approx(curve.seconds(0, 1000) + curve.seconds(0, 10))


def test_who_has_less_left_than_the_newcomer_is_not_set_aside() -> None:
    assert serve([(0.0, 1000), (0.85, 160)], Ordering(Order.SRPT)).ended[0] == pytest.approx(1.0)


def test_ageing_lets_shorter_prompts_pass_only_while_the_longer_one_is_young() -> None:
    prompts = [(0.0, 100), (0.0, 1000)] + [(0.09 * n, 100) for n in range(1, 100)]
    aged = serve(prompts, Ordering(Order.AGED, slack=2.0)).ended[1]
    srpt = serve(prompts, Ordering(Order.SRPT)).ended[1]
    # due 2 s after it came: the 21 that came until 1.8 s, due before it, take until 2.1 s
    assert aged == pytest.approx(3.1, abs=0.11)
    assert srpt > 10.0


def test_nothing_starts_whose_export_has_no_room() -> None:
    clock, listener = Clock(), Listener()
    listener.nbytes = 60.0
    node = PrefillNode("n", "local", CURVE, 100, Ordering(), clock, listener, pool_bytes=100.0)
    first, second = Job(0, 0.0, 100, 1, ()), Job(1, 0.0, 100, 1, ())
    second.wire_bytes = 60.0
    node.submit(first, 0.0)
    node.submit(second, 0.0)
    clock.run()
    assert list(listener.ended) == [0]
    node.exported(60.0, clock.now)
    clock.run()
    assert list(listener.ended) == [0, 1]


def test_a_prompt_that_is_withdrawn_leaves_nothing_behind() -> None:
    clock, listener = Clock(), Listener()
    node = PrefillNode("n", "local", CURVE, 100, Ordering(), clock, listener)
    jobs = [Job(index, 0.0, 100, 1, ()) for index in range(3)]
    for job in jobs:
        node.submit(job, 0.0)
    node.withdraw(jobs[0], 0.0)
    node.withdraw(jobs[2], 0.0)
    node.withdraw(jobs[2], 0.0)
    clock.run()
    assert listener.ended == {1: pytest.approx(0.1)}
    assert node.queued_tokens == 0
    assert node.busy_s == pytest.approx(0.1)
