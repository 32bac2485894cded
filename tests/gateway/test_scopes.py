"""A key that is bound to clusters, at every route that there is: it learns and changes nothing of others."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi.routing import APIRoute

from gateway.keys import Role as KeyRole
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage

THEIRS = ("zebra", "p-zebra")
GENERAL = {"/tokenize", "/detokenize"}
"""Which concern no cluster."""


async def furnished(stage: Open) -> Stage:
    """Two clusters at work, one of which is not the key's."""
    one = await stage()
    await one.pair("zebra")
    one.register("east")
    await one.node("p-east", Role.PREFILL, cluster="east")
    answer = await one.complete(words=60, headers={"x-prfaas-route-hint": "zebra", "x-request-id": "of-zebra"})
    assert answer.headers["x-prfaas-route"] == "remote:zebra"
    await one.client.post("/v1/clusters/zebra/drain")
    await one.client.post("/v1/clusters/zebra/resume")
    return one


def requests(one: Stage, name: str) -> list[tuple[str, str]]:
    """Every method and path, about a cluster ``name``, its node, its request."""
    found = []
    values = {"name": name, "node_id": f"p-{name}", "key_id": "0", "number": "1"}
    for route in one.gateway._routes.routes:
        if isinstance(route, APIRoute) and not route.path.startswith("/page/"):
            path = route.path
            values["name"] = f"of-{name}" if "decisions" in path else name
            path = re.sub(r"\{(\w+)(:\w+)?\}", lambda match: values[match[1]], path)
            found += [(method, path) for method in sorted(route.methods - {"HEAD", "OPTIONS"})]
    return found


@pytest.mark.parametrize("role", [KeyRole.OPERATOR, KeyRole.PLANNER])
async def test_a_bound_key_learns_and_changes_nothing_of_other_clusters(stage: Open, role: KeyRole) -> None:
    one = await furnished(stage)
    one.gateway.keys.create("root", KeyRole.ADMIN)
    _, secret = one.gateway.keys.create("of east", role, False, frozenset({"east"}))
    before = one.gateway.registry.cluster("zebra")
    nowhere = dict(zip(requests(one, "zebra"), requests(one, "nowhere"), strict=True))
    assert len(nowhere) > 40
    async with httpx.AsyncClient(base_url=one.url, headers={"Authorization": f"Bearer {secret}"}) as client:
        for (method, path), (_, other) in nowhere.items():
            body = None if method in ("GET", "DELETE") else {"name": "zebra", "role": "prefill", "hours": 1.0}
            answer = await client.request(method, path, json=body)
            if path != other:  # told as of what is not there
                unknown = await client.request(method, other, json=body)
                assert (answer.status_code, answer.text.replace("zebra", "nowhere")) == (
                    unknown.status_code,
                    unknown.text.replace("zebra", "nowhere"),
                ), path
            elif method == "GET":
                assert not any(name in answer.text for name in THEIRS), (path, answer.text)
            if method != "GET" and path not in GENERAL:
                assert answer.status_code >= 400, (method, path)
    assert one.gateway.registry.cluster("zebra") == before
    assert [node.node_id for node in one.gateway.registry.nodes("zebra")] == ["p-zebra"]


async def test_a_client_s_key_learns_nothing_of_clusters_and_nodes(stage: Open) -> None:
    one = await furnished(stage)
    one.gateway.keys.create("root", KeyRole.ADMIN)
    _, secret = one.gateway.keys.create("client", KeyRole.CLIENT)
    async with httpx.AsyncClient(base_url=one.url, headers={"Authorization": f"Bearer {secret}"}) as client:
        for method, path in requests(one, "zebra"):
            answer = await client.request(method, path, json=None if method == "GET" else {"name": "zebra"})
            assert path in GENERAL or method == "GET" or answer.status_code >= 400, (method, path)
            assert not any(name in answer.text for name in THEIRS) or answer.status_code in (403, 404), path
            if path in ("/v1/clusters", "/v1/nodes", "/metrics", "/v1/audit", "/v1/keys"):
                assert answer.status_code == 403, path


async def test_a_cluster_that_cannot_be_registered_is_not_told_which_nodes_there_are(stage: Open) -> None:
    one = await stage()
    await one.node("d-home", Role.DECODE, kv=False)
    one.gateway.keys.create("root", KeyRole.ADMIN)
    _, secret = one.gateway.keys.create("of east", KeyRole.OPERATOR, False, frozenset({"east"}))
    headers = {"Authorization": f"Bearer {secret}"}
    answer = await one.client.post("/v1/clusters", json={"name": "east", "dial": "out"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dial")
    assert "d-home" not in answer.text
