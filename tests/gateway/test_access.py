"""Keys, roles and the loopback rule, at the level of ASGI."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.keys import KeyBook, Role
from gateway.model import ServedModel
from gateway.state import LOOK_EVERY_S, State
from tests.gateway.direct import DirectTransport

BODY = {"model": "tiny", "prompt": "ab"}
CLOSED = [
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/clusters"),
    ("GET", "/v1/nodes"),
    ("GET", "/v1/status"),
    ("GET", "/v1/decisions"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/no/such/route"),
    ("GET", "/docs"),
]


@pytest.fixture
async def gateway(config: GatewayConfig, model: ServedModel) -> AsyncIterator[Gateway]:
    gateway = Gateway(config, model, State(None))
    yield gateway
    gateway.close()


def caller(gateway: Gateway, address: str = "127.0.0.1", host: str = "localhost", **headers: str) -> httpx.AsyncClient:
    transport = DirectTransport(gateway, address)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", headers=headers)


def with_key(gateway: Gateway, role: Role, **permits: Any) -> httpx.AsyncClient:
    _, secret = gateway.keys.create("test", role, **permits)
    return caller(gateway, "203.0.113.9", "gateway.example", authorization=f"Bearer {secret}")


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_with_keys_everything_but_the_open_paths_needs_one(gateway: Gateway, method: str, path: str) -> None:
    gateway.keys.create("a", Role.ADMIN)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic xyz"}):
        answer = await caller(gateway, **headers).request(method, path, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/", "/live", "/ready"])
async def test_liveness_readiness_and_the_page_are_open(gateway: Gateway, path: str) -> None:
    gateway.keys.create("a", Role.ADMIN)
    assert (await caller(gateway, "203.0.113.9", "gateway.example").get(path)).status_code in (200, 503)


async def test_without_keys_a_loopback_caller_is_admin(gateway: Gateway) -> None:
    for address, host in (("127.0.0.1", "localhost"), ("127.0.0.1", "127.0.0.1:8000"), ("::1", "[::1]:8000")):
        assert (await caller(gateway, address, host).get("/v1/keys")).status_code == 200


@pytest.mark.parametrize(
    ("address", "host", "headers"),
    [
        ("203.0.113.9", "localhost", {}),
        ("127.0.0.1", "evil.example", {}),
        ("127.0.0.1", "localhost", {"origin": "https://evil.example"}),
        ("127.0.0.1", "localhost", {"x-forwarded-for": "127.0.0.1"}),
        ("127.0.0.1", "localhost", {"forwarded": "for=127.0.0.1"}),
    ],
)
async def test_without_keys_nobody_else_is(gateway: Gateway, address: str, host: str, headers: dict[str, str]) -> None:
    answer = await caller(gateway, address, host, **headers).get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "loopback_only")


ALLOWED = {
    ("POST", "/v1/completions"): {Role.CLIENT},
    ("POST", "/tokenize"): {Role.CLIENT, Role.OPERATOR},
    ("GET", "/v1/models"): {Role.CLIENT, Role.OPERATOR, Role.PLANNER},
    ("GET", "/metrics"): {Role.OPERATOR, Role.PLANNER},
    ("GET", "/v1/status"): {Role.OPERATOR, Role.PLANNER},
    ("GET", "/v1/decisions"): {Role.OPERATOR, Role.PLANNER},
    ("POST", "/v1/clusters"): {Role.OPERATOR},
    ("POST", "/v1/clusters/x/drain"): {Role.OPERATOR},
    ("DELETE", "/v1/clusters/x"): {Role.OPERATOR},
    ("GET", "/v1/keys"): set[Role](),
    ("POST", "/v1/keys"): set[Role](),
    ("DELETE", "/v1/keys/x"): set[Role](),
}


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_reaches_what_is_its_own(gateway: Gateway, role: Role) -> None:
    gateway.keys.create("root", Role.ADMIN)
    async with with_key(gateway, role) as client:
        for (method, path), roles in ALLOWED.items():
            answer = await client.request(method, path, json={})
            permitted = role is Role.ADMIN or role in roles
            assert (answer.status_code != 403) == permitted, (role, method, path, answer.text)


async def test_a_route_hint_needs_its_permission(gateway: Gateway) -> None:
    hint = {"x-prfaas-route-hint": "local"}
    async with with_key(gateway, Role.CLIENT) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=hint)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "route_hint_forbidden")
    async with with_key(gateway, Role.CLIENT, route_hint=True) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=hint)
    assert answer.json()["error"]["code"] == "no_decode_node"


async def test_keys_are_made_listed_and_revoked_over_the_api_without_showing_secrets(gateway: Gateway) -> None:
    admin = caller(gateway)
    first = await admin.post("/v1/keys", json={"role": "client"})
    assert (first.status_code, first.json()["error"]["param"]) == (400, "role")
    root = (await admin.post("/v1/keys", json={"role": "admin", "name": "root"})).json()
    admin.headers["authorization"] = f"Bearer {root['key']}"
    made = (await admin.post("/v1/keys", json={"role": "client", "clusters": ["east"], "route_hint": True})).json()
    listed = (await admin.get("/v1/keys")).json()["keys"]
    assert [(k["role"], k["clusters"], k["route_hint"]) for k in listed] == [
        ("admin", None, False),
        ("client", ["east"], True),
    ]
    assert made["key"] not in str(listed)
    client = caller(gateway, authorization=f"Bearer {made['key']}")
    assert (await client.get("/v1/models")).status_code == 200
    assert (await admin.delete(f"/v1/keys/{made['id']}")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 401
    assert (await admin.delete(f"/v1/keys/{made['id']}")).status_code == 404


async def test_a_bad_key_body_names_its_field(gateway: Gateway) -> None:
    for body, param in (({"role": "king"}, "role"), ({}, "role"), ({"role": "admin", "clusters": "x"}, "clusters")):
        assert (await caller(gateway).post("/v1/keys", json=body)).json()["error"]["param"] == param


async def test_cluster_routes_refuse_what_makes_no_sense(gateway: Gateway) -> None:
    client = caller(gateway)
    assert (await client.post("/v1/clusters", json={"name": "east"})).status_code == 201
    assert (await client.post("/v1/clusters", json={"name": "east"})).status_code == 409
    for body, param in (
        ({"name": "a b"}, "name"),
        ({}, "name"),
        ({"name": "x", "dial": "up"}, "dial"),
        ({"name": "x", "egress_gbps": -1}, "egress_gbps"),
    ):
        answer = await client.post("/v1/clusters", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for method, path in (("POST", "/v1/clusters/local/drain"), ("DELETE", "/v1/clusters/local")):
        assert (await client.request(method, path)).status_code == 409
    assert (await client.get("/v1/clusters/west")).status_code == 404
    assert (await client.delete("/v1/clusters/east")).json()["state"] == "removed"
    assert (await client.get("/v1/clusters/east")).status_code == 404
    assert (await client.post("/v1/clusters", json={"name": "east"})).status_code == 201


def test_the_state_keeps_no_secret_of_a_key_and_notices_what_another_process_does(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    mine, theirs = State(file), State(file)
    book, other = KeyBook(mine), KeyBook(theirs)
    key_id, secret = other.create("x", Role.CLIENT)
    time.sleep(LOOK_EVERY_S + 0.05)
    found = book.find(secret)
    assert found is not None
    assert found.role is Role.CLIENT
    other.revoke(key_id)
    time.sleep(LOOK_EVERY_S + 0.05)
    assert book.find(secret) is None
    other.create("y", Role.CLIENT)
    mine.close()
    theirs.close()
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert secret.encode() not in data
    assert file.stat().st_mode & 0o077 == 0
