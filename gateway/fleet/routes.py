"""``GET /v1/engines``: the external engines, for operators and planners."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Response

from gateway.answers import json_answer, needs
from gateway.fleet.fleet import Fleet
from gateway.fleet.views import fleet_view
from gateway.keys import Role


def add_engine_routes(api: FastAPI, fleet: Fleet) -> None:
    """Add it."""

    @api.get("/v1/engines", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def engines() -> Response:
        return json_answer({"engines": fleet_view(fleet, asyncio.get_running_loop().time())})
