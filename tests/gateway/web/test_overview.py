"""What the page's figures say, and to whom."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.keys import Role as KeyRole
from gateway.web.files import FILES
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage


async def peopled(stage: Open) -> Stage:
    """Two clusters, nodes, and requests by both ways."""
    one = await stage()
    for name in ("east", "west"):
        one.register(name)
        await one.node(f"p-{name}", Role.PREFILL, cluster=name)
    await one.node("p", Role.PREFILL)
    await one.node("d", Role.DECODE)
    for words in (3, 80, 200):
        assert (await one.complete(words=words)).status_code == 200
    return one


async def seen_by(one: Stage, role: KeyRole, clusters: frozenset[str] | None = None) -> dict[str, Any]:
    if not len(one.gateway.keys):
        one.gateway.keys.create("root", KeyRole.ADMIN)
    _, secret = one.gateway.keys.create("someone", role, False, clusters)
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=one.url, headers=headers) as client:
        answer = await client.get("/v1/overview")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_an_operator_sees_traffic_lengths_clusters_and_nodes(stage: Open) -> None:
    found = await seen_by(await peopled(stage), KeyRole.OPERATOR)
    assert [cluster["name"] for cluster in found["clusters"]] == ["local", "east", "west"]
    assert sorted(node["node_id"] for node in found["nodes"]) == ["d", "p", "p-east", "p-west"]
    routes = found["traffic"]["routes"]
    assert found["traffic"]["requests"] == sum(route["requests"] for route in routes.values()) == 3
    assert routes["local"]["requests"] == 1
    assert sum(each["count"] for each in found["lengths"]) == 3
    assert all(low["high"] == high["low"] for low, high in zip(found["lengths"], found["lengths"][1:], strict=False))
    assert len(found["requests"]) == 3
    assert (found["who"]["approves"], found["who"]["reports"]) == (True, False)


async def test_what_a_role_may_not_see_is_not_sent(stage: Open) -> None:
    one = await peopled(stage)
    client = await seen_by(one, KeyRole.CLIENT)
    assert client.keys() == {"who", "time", "ready", "reason", "model"}
    bound = await seen_by(one, KeyRole.OPERATOR, frozenset({"east"}))
    assert [cluster["name"] for cluster in bound["clusters"]] == ["east"]
    assert [node["node_id"] for node in bound["nodes"]] == ["p-east"]
    assert bound.keys().isdisjoint({"traffic", "lengths", "requests", "proposals", "assessment", "threshold_tokens"})
    planner = await seen_by(one, KeyRole.PLANNER)
    assert (planner["who"]["approves"], planner["who"]["reports"]) == (False, True)


async def test_figures_need_a_key_and_the_shell_none(stage: Open) -> None:
    one = await stage()
    one.gateway.keys.create("root", KeyRole.ADMIN)
    assert (await one.client.get("/v1/overview")).status_code == 401
    for path in FILES:
        answer = await one.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = await one.client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/", "/page/../routes.py", "/page/shell.py", "/page/index.html"])
async def test_nothing_but_the_page_s_files_is_served(stage: Open, path: str) -> None:
    one = await stage()
    assert (await one.client.get(path)).status_code == 404


async def test_an_idle_gateway_has_figures_too(stage: Open) -> None:
    one = await stage()
    found = (await one.client.get("/v1/overview")).json()
    assert (found["ready"], found["lengths"], found["requests"], found["traffic"]["requests"]) == (False, [], [], 0)
