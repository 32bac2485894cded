"""Work that nobody awaits is not lost without a word."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvcache.background import in_background

log = logging.getLogger("somewhere")


async def test_what_breaks_is_said_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks() -> None:
        raise ValueError("the cause")

    await asyncio.wait([in_background(breaks(), log, "nothing is copied any more")])
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert (record.name, record.message) == ("somewhere", "nothing is copied any more")
    assert "the cause" in caplog.text


async def test_what_ends_or_is_cancelled_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    async def ends() -> None:
        await asyncio.sleep(0)

    ended, cancelled = in_background(ends(), log, "x"), in_background(ends(), log, "y")
    cancelled.cancel()
    await asyncio.wait([ended, cancelled])
    await asyncio.sleep(0)
    assert caplog.records == []
