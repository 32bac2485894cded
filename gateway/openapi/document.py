"""The OpenAPI 3.1 document of one gateway: paths and parameters from its routes, the rest from ``operations``."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from gateway.access import OPEN_PATHS
from gateway.answers import roles_of
from gateway.openapi.answers import ERROR
from gateway.openapi.operations import GENERATION, JSON, ROUTES, UNTOLD, Operation

_REFS = "#/components/schemas/{name}"
_CONVERTER = re.compile(r"\{(\w+):\w+\}")
_ERROR_WORDS = {
    400: "Something in the request cannot be; param names it",
    401: "No valid key was shown",
    403: "This key, or this caller, may not do that",
    404: "There is no such thing",
    408: "The body did not come in time",
    409: "It cannot be done as things are",
    411: "The body has no length",
    413: "The body is too large",
    415: "The body is no JSON",
    429: "A limit is reached; Retry-After says when to come again",
    503: "It cannot be done now; Retry-After says when to come again",
    504: "It took too long",
}
_HEADERS_IN = (
    ("x-request-id", "An id of the client's, echoed and kept"),
    ("x-prfaas-route-hint", "local, remote or a cluster's name; needs a permission of the key"),
    ("x-prfaas-kv-quality", "exact, near or compact: how inexact KV may become on its way"),
    ("x-prfaas-ttft-slo", "Seconds within which the first token is wanted"),
    ("x-session-id", "The conversation that this request goes on with"),
    ("traceparent", "The caller's trace, as W3C Trace Context writes it"),
)


def make_document(api: FastAPI, version: str) -> dict[str, Any]:
    """All operations of these routes, and the two that lie below them."""
    bodies = [one.body for one in (*ROUTES.values(), *GENERATION.values()) if one.body is not None]
    typed = [one.answer for one in ROUTES.values() if isinstance(one.answer, type)]
    _, components = msgspec.json.schema_components([*bodies, *typed], ref_template=_REFS)
    document = get_openapi(title="prfaas", version=version, openapi_version="3.1.0", routes=api.routes)
    paths: dict[str, Any] = {}
    for route in api.routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        path = path_of(route)
        for method in sorted(route.methods or ()):
            found = document["paths"][route.path_format][method.lower()]
            parameters = found.get("parameters", [])
            operation = ROUTES.get((method, path), UNTOLD)
            paths.setdefault(path, {})[method.lower()] = _described(
                method, path, operation, parameters, roles_of(route)
            )
    for (method, path), operation in GENERATION.items():
        named = [
            {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            for name, text in _HEADERS_IN
        ]
        paths.setdefault(path, {})[method.lower()] = _described(method, path, operation, named, ("client",))
    return {
        "openapi": "3.1.0",
        "info": {"title": "prfaas", "version": version, "description": "A cross-datacenter prefill gateway"},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**document.get("components", {}).get("schemas", {}), **components, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def path_of(route: APIRoute) -> str:
    """A route's path without converters."""
    return _CONVERTER.sub(r"{\1}", route.path)


def _described(
    method: str, path: str, operation: Operation, parameters: list[dict[str, Any]], roles: tuple[str, ...]
) -> dict[str, Any]:
    opened = path in OPEN_PATHS
    described: dict[str, Any] = {
        "operationId": _operation_id(method, path),
        "summary": operation.summary,
        "parameters": parameters,
        "responses": _responses(operation, bool(parameters), opened),
        "security": [] if opened else [{"key": []}],
    }
    if roles:
        described["description"] = f"For keys with role {' or '.join((*roles, 'admin'))}."
    if operation.body is not None:
        schema = {"$ref": _REFS.format(name=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _responses(operation: Operation, has_parameters: bool, opened: bool) -> dict[str, Any]:
    # without a schema: readers of version 3.1 do not agree whether it would be of the stream or of each item in it
    content: dict[str, Any] = {media: {} for media in operation.media}
    if operation.json:
        answer = operation.answer
        schema = {"$ref": _REFS.format(name=answer.__name__)} if isinstance(answer, type) else answer
        content = {JSON: {"schema": schema}, **content}
    headers = {name: {"schema": {"type": "string"}} for name in operation.headers}
    responses: dict[str, Any] = {
        str(operation.status): {"description": operation.summary, "content": content, "headers": headers}
    }
    statuses = set(operation.errors)
    if not opened:
        statuses |= {401, 403}
    if operation.body is not None:
        statuses |= {400, 401, 403, 408, 411, 413, 415}
    if has_parameters:
        statuses.add(400)
    for status in sorted(statuses):
        own_form = status in operation.same_form
        problem = operation.answer if own_form else {"$ref": _REFS.format(name="Error")}
        responses[str(status)] = {"description": _ERROR_WORDS[status], "content": {JSON: {"schema": problem}}}
    return responses


def _operation_id(method: str, path: str) -> str:
    return re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
