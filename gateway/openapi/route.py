"""``/openapi.json``."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Response

from gateway.answers import json_answer
from gateway.openapi.document import make_document


def add_openapi(api: FastAPI) -> None:
    """Add the route, after all others; any caller with a key may read it. The document is made when first asked for."""

    @cache
    def document() -> dict[str, Any]:
        return make_document(api, _version())

    @api.get("/openapi.json")
    async def openapi() -> Response:
        return json_answer(document())


def _version() -> str:
    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "0"
