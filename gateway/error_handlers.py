"""Whatever goes wrong in a route is answered in the form of OpenAI's errors."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.answers import refused
from gateway.errors import ApiError, bad_field
from gateway.methods import methods_at


def add_error_handlers(api: FastAPI) -> None:
    """Of refusals, of what the framework itself refuses, and of what breaks."""

    @api.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return refused(error)

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path, status = request.url.path, error.status_code
        if status == 404:
            return refused(ApiError(404, f"no route {path}", code="not_found"))
        if status == 405:
            allow = methods_at(api.routes, path)
            text = f"{path} takes {', '.join(allow)}, not {request.method}"
            return refused(ApiError(405, text, code="method_not_allowed", allow=allow))
        return refused(ApiError(status, str(error.detail)))

    @api.exception_handler(RequestValidationError)
    async def on_bad_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        return refused(bad_field(name, f"{name}: {first['msg']}"))

    @api.exception_handler(Exception)
    async def on_broken(_: Request, error: Exception) -> Response:
        return refused(ApiError(500, "internal error", code="internal_error"))
