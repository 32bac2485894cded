"""A deadline that moves while it is waited for."""

from __future__ import annotations

import asyncio

import pytest

from gateway.dialects.patience import patience


async def test_what_may_take_longer_by_now_is_not_late_yet() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    ends = [began + 0.03]
    loop.call_later(0.01, ends.append, began + 0.08)
    with pytest.raises(TimeoutError):
        async with patience(lambda: ends[-1]):
            await asyncio.sleep(5.0)
    assert 0.07 < loop.time() - began < 1.0


async def test_what_ends_in_time_is_not_disturbed_afterwards() -> None:
    ends = asyncio.get_running_loop().time() + 0.03
    async with patience(lambda: ends):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
