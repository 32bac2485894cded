"""A job ends once, in the way that came first."""

from __future__ import annotations

import asyncio

from kvcache.fate import Ending, JobEnded, JobFate


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def forever() -> None:
    await asyncio.Event().wait()


async def test_work_that_ends_well_has_no_ending_and_cannot_be_ended_any_more() -> None:
    fate = JobFate("queue")
    assert await fate.run(asyncio.sleep(0), soon()) is None
    fate.end("late")
    assert fate.over
    assert fate.ending is None


async def test_the_first_ending_counts_and_stops_the_work() -> None:
    fate = JobFate("queue")
    running = asyncio.create_task(fate.run(forever(), soon()))
    await asyncio.sleep(0)
    fate.stage = "transfer"
    fate.end("first", "why", told=True)
    fate.end("second")
    assert await running == Ending("transfer", "first", "why", True)


async def test_the_deadline_ends_the_work() -> None:
    fate = JobFate("prefill")
    ending = await fate.run(forever(), soon(0.02))
    assert ending is not None
    assert (ending.stage, ending.cause) == ("prefill", "deadline")


async def test_work_that_raises_ends_with_its_cause_and_stage() -> None:
    async def refuse() -> None:
        raise JobEnded("no_room", "full", stage="load")

    assert await JobFate("queue").run(refuse(), soon()) == Ending("load", "no_room", "full")


async def test_an_unexpected_error_is_an_ending_too() -> None:
    async def fail() -> None:
        raise KeyError("x")

    ending = await JobFate("queue").run(fail(), soon())
    assert ending is not None
    assert (ending.cause, ending.detail) == ("internal", "KeyError: 'x'")


async def test_a_job_that_was_ended_before_it_began_does_no_work() -> None:
    began = []

    async def work() -> None:
        began.append(True)

    fate = JobFate("queue")
    fate.end("cancelled")
    assert await fate.run(work(), soon()) == Ending("queue", "cancelled")
    assert began == []


async def test_run_returns_only_when_the_work_has_cleaned_up() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0.02)
            cleaned.append(True)

    fate = JobFate("queue")
    running = asyncio.create_task(fate.run(work(), soon()))
    await asyncio.sleep(0.01)
    fate.end("cancelled")
    await running
    assert cleaned == [True]
