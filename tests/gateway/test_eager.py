"""A coroutine without a task goes on at once, and is cancelled as a task is, but loses nothing that it waited for."""

from __future__ import annotations

import asyncio

import pytest

from gateway.eager import Eager


class Seen:
    """What a coroutine came to."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.over: list[Eager] = []

    async def wait(self, *futures: asyncio.Future[object]) -> None:
        self.said.append("began")
        try:
            for future in futures:
                self.said.append(await future)
        except asyncio.CancelledError:
            self.said.append("cancelled")
            raise

    def eager(self, *futures: asyncio.Future[object]) -> Eager:
        return Eager(self.wait(*futures), self.over.append)


async def test_it_runs_until_it_waits_and_on_when_that_is_there() -> None:
    seen, loop = Seen(), asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    eager = seen.eager(first, second)
    assert seen.said == []
    eager.start()
    assert seen.said == ["began"]
    first.set_result(1)
    await asyncio.sleep(0)
    assert (seen.said, seen.over) == (["began", 1], [])
    second.set_result(2)
    await asyncio.sleep(0)
    assert (seen.said, seen.over) == (["began", 1, 2], [eager])
    assert not eager.cancel()


async def test_what_waits_for_nothing_is_over_at_once() -> None:
    seen = Seen()
    eager = seen.eager()
    eager.start()
    assert (seen.said, seen.over) == (["began"], [eager])


async def test_cancelled_it_cancels_what_it_waits_for() -> None:
    seen = Seen()
    task = asyncio.create_task(asyncio.sleep(60))
    eager = seen.eager(task)  # type: ignore[arg-type]
    eager.start()
    assert eager.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert task.cancelled()
    assert (seen.said, seen.over) == (["began", "cancelled"], [eager])


async def test_cancelled_when_that_is_there_already_it_gets_it_and_is_cancelled_at_the_next() -> None:
    seen, loop = Seen(), asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    eager = seen.eager(first, second)
    eager.start()
    first.set_result(1)
    assert eager.cancel()
    await asyncio.sleep(0.01)
    assert (seen.said, seen.over) == (["began", 1, "cancelled"], [eager])
    assert second.cancelled()


async def test_cancelled_from_within_it_is_cancelled_where_it_waits_next() -> None:
    future = asyncio.get_running_loop().create_future()
    made: list[Eager] = []

    async def ends_itself() -> None:
        made[0].cancel()
        await future

    made.append(Eager(ends_itself(), lambda _: None))
    made[0].start()
    assert future.cancelled()


@pytest.mark.parametrize("leaves", [False, True])
async def test_it_may_give_others_a_turn(leaves: bool) -> None:
    said: list[str] = []

    async def gives() -> None:
        said.append("before")
        await asyncio.sleep(0)
        said.append("after")

    over: list[Eager] = []
    eager = Eager(gives(), over.append)
    eager.start()
    assert said == ["before"]
    if leaves:
        assert eager.cancel()
    await asyncio.sleep(0.01)
    assert (said, over) == (["before"] if leaves else ["before", "after"], [eager])


async def test_an_error_that_nobody_caught_is_raised_where_it_goes_on() -> None:
    over: list[Eager] = []

    async def breaks() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Eager(breaks(), over.append).start()
    assert len(over) == 1
