"""Gateways in front of engines that say what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Open, Stage
from tests.gateway.relay.backend import Backend, Say, backend, engines_file


@pytest.fixture
async def front(stage: Open, tmp_path: Path) -> AsyncIterator[Any]:
    """``await front(say, ...)`` opens a gateway before engines that say that; returns it with them."""
    async with AsyncExitStack() as stack:

        async def start(
            *say: Say, fields: dict[str, object] | None = None, **changes: Any
        ) -> tuple[Stage, list[Backend]]:
            engines = [await stack.enter_async_context(backend(one)) for one in say]
            one = await stage(engines_file=engines_file(tmp_path, *engines, **(fields or {})), **changes)
            await one.until(lambda: all(engine.trouble is None for engine in one.gateway.fleet.engines))
            return one, engines

        yield start
