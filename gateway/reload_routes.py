"""`/v1/reload`: read the configuration again, as SIGHUP does, and hear what came of it."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.responses import Response

from gateway.answers import json_answer, needs
from gateway.config import ConfigError
from gateway.errors import ApiError
from gateway.keys import Role
from gateway.live import Change


def add_reload_routes(api: FastAPI, reload: Callable[[], list[Change]]) -> None:
    """Add it. ``reload`` raises ConfigError where nothing was changed."""

    @api.post("/v1/reload", dependencies=[needs(Role.OPERATOR)])
    async def reload_now() -> Response:
        try:
            changes = reload()
        except ConfigError as error:
            raise ApiError(409, str(error), code="not_reloaded") from error
        changed = [{"option": one.option, "was": str(one.was), "now": str(one.now)} for one in changes]
        return json_answer({"changed": changed})
