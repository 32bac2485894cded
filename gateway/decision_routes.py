"""``/v1/decisions``: records of where requests went and why, one by one or all of them as JSON lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from fastapi.responses import StreamingResponse

from gateway.answers import json_answer, needs
from gateway.decisions import Decisions
from gateway.errors import ApiError
from gateway.keys import Role
from gateway.shared.sharing import Sharing

JSON_LINES = "application/jsonl"


def add_decision_routes(api: FastAPI, decisions: Decisions, sharing: Sharing) -> None:
    """Add them; operators and planners may read. What other gateways decided is shown, too, but not exported."""
    may_read: Any = [needs(Role.OPERATOR, Role.PLANNER)]

    @api.get("/v1/decisions", dependencies=may_read)
    async def recent(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        own = await asyncio.to_thread(decisions.recent, limit)
        others = await sharing.recent_decisions(limit)
        if others:
            found = {record["id"]: record for record in (*others, *own)}
            own = sorted(found.values(), key=lambda record: record["at"], reverse=True)[:limit]
        return json_answer({"decisions": own})

    @api.get("/v1/decisions/export", dependencies=may_read)
    async def export() -> Response:
        return StreamingResponse(_lines(decisions), media_type=JSON_LINES)

    @api.get("/v1/decisions/{name}", dependencies=may_read)
    async def decision(name: str) -> Response:
        record = await asyncio.to_thread(decisions.find, name) or await sharing.find_decision(name)
        if record is None:
            raise ApiError(404, f"no decision is kept for request {name!r}", code="decision_not_found")
        return json_answer(record)


async def _lines(decisions: Decisions) -> AsyncIterator[bytes]:
    """All that are kept, oldest first, a page at a time."""
    after = 0
    while True:
        page, after = await asyncio.to_thread(decisions.page, after)
        if not page:
            return
        yield b"".join(line + b"\n" for line in page)
