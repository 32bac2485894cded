"""The page's one address for figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Response

from gateway.answers import json_answer, some_clusters
from gateway.decisions import Decisions
from gateway.keys import Principal, Role
from gateway.web.files import ENTRY
from gateway.web.overview import RECENT, overview
from gateway.web.shell import add_shell

Anyone = Annotated[Principal, some_clusters(Role.CLIENT, Role.OPERATOR, Role.PLANNER)]


def add_page(
    api: FastAPI,
    status: Callable[[], Mapping[str, Any]],
    proposals: Callable[[], Mapping[str, Any]],
    decisions: Decisions,
    has_keys: Callable[[], bool],
) -> None:
    """Add the page and its figures to ``api``; ``status`` and ``proposals`` give what the routes of these names do."""
    add_shell(api)

    @api.get(ENTRY, include_in_schema=False)
    async def entry() -> Response:
        return json_answer({"key_needed": has_keys()}, headers={"cache-control": "no-store"})

    @api.get("/v1/overview")
    async def figures(caller: Anyone) -> Response:
        records = await asyncio.to_thread(decisions.recent, RECENT)
        answer = overview(caller, status(), proposals(), records, time.time())
        return json_answer(answer, headers={"cache-control": "no-store"})
