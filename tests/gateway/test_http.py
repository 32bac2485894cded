"""HTTP itself: methods, media types, and pages of other origins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from gateway.app import Gateway
from gateway.config import ConfigError, GatewayConfig
from gateway.keys import Role
from gateway.model import ServedModel
from gateway.state import State
from tests.gateway.conftest import Open
from tests.gateway.direct import DirectTransport

PAGE = "https://chat.example"
ERROR = {"message", "type", "param", "code"}


@pytest.fixture
async def client(config: GatewayConfig, model: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    gateway = Gateway(replace(config, cors_origins=(PAGE,)), model, State(None))
    _, secret = gateway.keys.create("root", Role.ADMIN)
    transport = DirectTransport(gateway, "203.0.113.9")
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.example", headers=headers) as client:
        yield client
    gateway.close()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST, OPTIONS"),
        ("DELETE", "/v1/chat/completions", "POST, OPTIONS"),
        ("PUT", "/v1/clusters", "GET, HEAD, POST, OPTIONS"),
        ("POST", "/live", "GET, HEAD, OPTIONS"),
        ("POST", "/v1/keys/x", "GET, HEAD, PATCH, DELETE, OPTIONS"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    client: httpx.AsyncClient, method: str, path: str, allow: str
) -> None:
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert set(answer.json()["error"]) == ERROR
    asked = await client.options(path)
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, allow, b"")


async def test_what_is_nowhere_is_404_by_every_method(client: httpx.AsyncClient) -> None:
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        answer = await client.request(method, "/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_head_is_that_of_the_get_without_its_body(stage: Open) -> None:
    one = await stage()
    for path in ("/live", "/v1/models"):
        head, get = await one.client.head(path), await one.client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
    assert (await one.client.head("/v1/completions")).status_code == 405


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"content-type": "application/json; charset=utf-8"}, 503, "no_decode_node"),
        ({"content-type": "application/vnd.api+json"}, 503, "no_decode_node"),
        ({"content-encoding": "gzip"}, 415, "unsupported_encoding"),
    ],
)
async def test_bodies_are_json(client: httpx.AsyncClient, headers: dict[str, str], status: int, code: str) -> None:
    body = b'{"model": "tiny", "prompt": "a"}'
    answer = await client.post("/v1/completions", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_body_of_no_length_is_411(client: httpx.AsyncClient) -> None:
    request = client.build_request("POST", "/v1/keys")
    del request.headers["content-length"]
    answer = await client.send(request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (411, "length_required")


async def test_a_page_of_a_named_origin_may_call_and_no_other(client: httpx.AsyncClient) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for path in ("/v1/completions", "/v1/models"):
        named = await client.options(path, headers=asks | {"origin": PAGE})
        assert named.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in named.headers["access-control-allow-headers"]
        assert ("POST" in named.headers["access-control-allow-methods"]) == (path == "/v1/completions")
        assert "access-control-allow-credentials" not in named.headers
        other = await client.options(path, headers=asks | {"origin": "https://chat.example.evil"})
        assert "access-control-allow-origin" not in other.headers
    answer = await client.get("/v1/models", headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["vary"] == "origin"
    refused = await client.post("/v1/completions", content=b"{", headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, PAGE)


async def test_without_an_origin_option_no_page_may_call(config: GatewayConfig, model: ServedModel) -> None:
    gateway = Gateway(config, model, State(None))
    transport = DirectTransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.options("/v1/models", headers={"origin": PAGE, "access-control-request-method": "GET"})
    gateway.close()
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["*", "chat.example", "https://chat.example/", "https://a b", "null"])
def test_what_is_no_origin_is_refused(config: GatewayConfig, origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        replace(config, cors_origins=(origin,))
