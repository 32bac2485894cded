"""`/health_generate`: whether an answer can be generated, by generating one; for load balancers that show a key."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.responses import Response

from gateway.answers import json_answer
from gateway.canary import Canary, NotHealthy


def add_health_routes(api: FastAPI, canary: Canary) -> None:
    """Add it. However many ask at once, there is one generation."""

    @api.get("/health_generate")
    async def health_generate() -> Response:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await canary.generate()
        except NotHealthy as error:
            return json_answer({"status": "not healthy", "reason": str(error)}, 503)
        return json_answer({"status": "healthy", "seconds": loop.time() - began})
