"""What several workers say of one job, and how it becomes one stream of events."""

from __future__ import annotations

from typing import Any

import pytest

from engines.protocol import Exported, JobEvent, Loaded, Offered, PrefillFinished, StoreCommand, Stored
from engines.vllm.jobs import VllmJob
from engines.vllm.messages import Broken, Computed, Dismissed, Ended, Enlisted


@pytest.fixture
async def job() -> VllmJob:
    return VllmJob("j", 2, lambda name: None)


async def told(job: VllmJob) -> list[JobEvent]:
    """All that it has said so far, ended by force."""
    job.deliver(PrefillFinished("j", 0.0))
    return [event async for event in job.stream][:-1]


async def test_what_one_rank_has_not_exported_is_not_there(job: VllmJob) -> None:
    for rank, seq in ((0, 4), (1, 2), (0, 9)):
        job.received(rank, Exported("j", seq), 10)
    assert await told(job) == [Exported("j", 2)]


async def test_moments_come_with_the_last_rank(job: VllmJob) -> None:
    pairs: list[tuple[Any, Any]] = [
        (Enlisted("j"), job.enlisted),
        (Computed("j", 1.5), job.computed),
        (Ended("j"), job.ended),
        (Dismissed("j", 64), job.dismissed),
    ]
    for message, moment in pairs:
        job.received(0, message, 1)
        job.received(0, message, 1)
        assert not moment.is_set(), "one rank twice is not two"
        job.received(1, message, 1)
        assert moment.is_set()
    assert job.compute_s == 1.5
    assert job.tokens == 64


async def test_a_load_is_over_when_every_rank_has_its_part(job: VllmJob) -> None:
    job.received(1, Loaded("j"), 1)
    assert not job.loaded
    job.received(0, Loaded("j"), 1)
    assert job.loaded
    assert await told(job) == [Loaded("j")]


async def test_an_offer_waits_until_every_rank_has_stored_it(job: VllmJob) -> None:
    for rank in range(2):
        job.received(rank, Offered("j", 0, 128, True), 1)
    assert job.awaits(StoreCommand("j", 128, ()))
    assert not job.awaits(StoreCommand("j", 64, ()))
    job.received(0, Stored("j", 128, True), 1)
    assert not job.settled.is_set()
    job.received(1, Stored("j", 128, False), 1)
    assert job.settled.is_set()
    assert await told(job) == [Offered("j", 0, 128, True), Stored("j", 128, False)]


async def test_one_rank_that_refuses_or_breaks_is_enough(job: VllmJob) -> None:
    job.received(1, Enlisted("j", "pages: one is outside the pool"), 1)
    job.received(0, Enlisted("j"), 1)
    assert job.refusal == "pages: one is outside the pool"
    job.received(0, Broken("j", "BlockLost: gone"), 1)
    job.received(1, Broken("j", "later"), 1)
    assert job.broken.result() == "BlockLost: gone"
