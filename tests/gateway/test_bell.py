"""Waiting costs one timer for as long as the time to wait for stays the same."""

from __future__ import annotations

import asyncio

import pytest

from gateway.bell import Bell


class Timers:
    """Counts what the loop is asked to call later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        loop = asyncio.get_running_loop()
        call_at = loop.call_at

        def counted(*args: object) -> asyncio.TimerHandle:
            self.made += 1
            return call_at(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_at", counted)


async def waits(bell: Bell, due: float) -> None:
    asyncio.get_running_loop().call_soon(bell.ring)
    await bell.wait(due)


async def test_many_waits_for_one_time_have_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    bell, due = Bell(), asyncio.get_running_loop().time() + 60
    timers = Timers(monkeypatch)
    for _ in range(5):
        await waits(bell, due)
    assert timers.made == 1
    await waits(bell, due + 1)
    assert timers.made == 2
    bell.close()


async def test_who_waits_in_vain_is_told_in_time_also_after_other_waits() -> None:
    bell, now = Bell(), asyncio.get_running_loop().time
    due = now() + 0.1
    await waits(bell, due)
    with pytest.raises(TimeoutError):
        await bell.wait(due)
    assert due - 0.01 <= now() < due + 1
    with pytest.raises(TimeoutError):
        await bell.wait(now() - 5)
    await waits(bell, now() + 60)
    bell.close()


async def test_who_is_cancelled_leaves_the_bell_to_others() -> None:
    bell = Bell()
    waiting = asyncio.create_task(bell.wait(asyncio.get_running_loop().time() + 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    await waits(bell, asyncio.get_running_loop().time() + 60)
    bell.close()
