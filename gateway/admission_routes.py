"""``/v1/tenants``: what tenants may use, and how much their work weighs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from gateway.answers import json_answer, needs
from gateway.bodies import read_json
from gateway.errors import ApiError
from gateway.keys import Role
from gateway.openai.requests import convert, decode_json
from gateway.tenants import Tenants
from gateway.terms import TenantTerms


def add_admission_routes(api: FastAPI, tenants: Tenants, max_body_bytes: int) -> None:
    """Add them; operators may read, admins may change."""

    def view(name: str, terms: TenantTerms) -> dict[str, Any]:
        return {"name": name, **msgspec.structs.asdict(terms)}

    @api.get("/v1/tenants", dependencies=[needs(Role.OPERATOR)])
    async def listed() -> Response:
        return json_answer({"tenants": [view(name, terms) for name, terms in tenants.all().items()]})

    @api.put("/v1/tenants/{name}", dependencies=[needs(Role.ADMIN)])
    async def change(name: str, request: Request) -> Response:
        body = await read_json(request.scope, request.receive, max_body_bytes)
        terms: TenantTerms = convert(decode_json(body), TenantTerms)
        tenants.set(name, terms)
        return json_answer(view(name, terms))

    @api.delete("/v1/tenants/{name}", dependencies=[needs(Role.ADMIN)])
    async def forget(name: str) -> Response:
        if not tenants.remove(name):
            raise ApiError(404, f"nothing is said of tenant {name!r}", param="name", code="tenant_not_found")
        return json_answer({"name": name, "removed": True})
