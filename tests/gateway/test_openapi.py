"""The OpenAPI document: no route without a description, no description without a route, and both of the same mind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fastapi.routing import APIRoute

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.keys import Role
from gateway.model import ServedModel
from gateway.openapi.document import make_document, path_of
from gateway.openapi.operations import GENERATION, ROUTES
from gateway.state import State
from tests.gateway.direct import DirectTransport


@pytest.fixture(scope="module")
def gateway(model_dir: Any, model: ServedModel) -> Iterator[Gateway]:
    gateway = Gateway(GatewayConfig(model_dir, "tiny"), model, State(None))
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def document(gateway: Gateway) -> dict[str, Any]:
    return make_document(gateway._routes, "1")


def test_every_route_is_described_and_every_description_has_its_route(gateway: Gateway) -> None:
    routes = {
        (method, path_of(route))
        for route in gateway._routes.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert routes - ROUTES.keys() == set(), "describe these in gateway/openapi/operations.py"
    assert ROUTES.keys() - routes == set()


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def refs(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for one in value.values():
                yield from refs(one)
        elif isinstance(value, list):
            for one in value:
                yield from refs(one)

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(refs(document)) <= known
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names)) == len(ROUTES) + len(GENERATION)


def test_bodies_answers_and_errors_are_told(document: dict[str, Any]) -> None:
    complete = document["paths"]["/v1/completions"]["post"]
    body = document["components"]["schemas"]["CompletionBody"]
    assert {"prompt", "n", "min_p", "logit_bias", "stream"} <= body["properties"].keys()
    assert set(body["required"]) == {"model", "prompt"}
    assert complete["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert {"400", "401", "403", "404", "413", "415", "429", "503", "504"} <= complete["responses"].keys()
    assert complete["security"] == [{"key": []}]
    assert document["paths"]["/live"]["get"]["security"] == []


async def test_the_roles_that_are_told_are_those_that_are_let_in(gateway: Gateway, document: dict[str, Any]) -> None:
    keys = {role: gateway.keys.create(role, role)[1] for role in Role}
    transport = DirectTransport(gateway, "203.0.113.9")
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.example") as client:
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                for role in (Role.CLIENT, Role.OPERATOR, Role.PLANNER):
                    told = operation.get("description", role.value)
                    concrete = path.replace("{number}", "1").replace("{", "").replace("}", "")
                    answer = await client.request(
                        method, concrete, content=b"{", headers={"authorization": f"Bearer {keys[role]}"}
                    )
                    forbidden = answer.status_code == 403
                    assert forbidden == (role.value not in told and bool(operation["security"])), (role, method, path)
        served = await client.get("/openapi.json", headers={"authorization": f"Bearer {keys[Role.CLIENT]}"})
        assert (await client.get("/openapi.json")).status_code == 401
    assert served.json()["paths"].keys() == document["paths"].keys()
    assert msgspec.json.encode(document)
