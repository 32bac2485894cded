"""Operator route of the interconnect: `GET /v1/topology`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query, Response

from gateway.answers import json_answer, needs
from gateway.interconnect import Interconnects
from gateway.keys import Role

SAMPLE_BYTES = 1 << 30


def add_interconnect_routes(api: FastAPI, interconnects: Interconnects) -> None:
    """Add the route to the gateway's application."""

    @api.get("/v1/topology", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def topology(nbytes: Annotated[int, Query(ge=1, le=1 << 44, alias="bytes")] = SAMPLE_BYTES) -> Response:
        return json_answer({"clusters": interconnects.view(nbytes, asyncio.get_running_loop().time())})
