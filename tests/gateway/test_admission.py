"""What keys and tenants may use: refused with 429, the limit's name and when to come again."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.keys import Role as KeyRole
from gateway.terms import KeyLimits
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import never


async def with_key(one: Stage, **limits: Any) -> dict[str, str]:
    """The headers of a fresh key's holder."""
    if not len(one.gateway.keys):
        _, root = one.gateway.keys.create("root", KeyRole.ADMIN)
        one.client.headers["authorization"] = f"Bearer {root}"
    _, key = one.gateway.keys.create("client", KeyRole.CLIENT, limits=KeyLimits(**limits))
    return {"authorization": f"Bearer {key}"}


def refused(answer: httpx.Response, limit: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert limit in error["message"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_requests_and_tokens_a_minute(stage: Open) -> None:
    one = await stage()
    await one.pair()
    slow = await with_key(one, requests_per_minute=6)
    assert (await one.complete(headers=slow)).status_code == 200
    refused(await one.complete(headers=slow), "requests_per_minute")
    few = await with_key(one, tokens_per_minute=60)
    assert (await one.complete(headers=few)).status_code == 200
    refused(await one.complete(headers=few), "tokens_per_minute")
    assert (await one.complete()).status_code == 200
    figures = (await one.client.get("/metrics")).text
    assert 'prfaas_refused_total{reason="requests_per_minute"} 1.0' in figures
    assert 'prfaas_refused_total{reason="tokens_per_minute"} 1.0' in figures


async def test_requests_at_once_of_a_key_and_of_all_keys_of_a_tenant(stage: Open) -> None:
    one = await stage()
    await one.node("d", Role.DECODE, on_generate=never)
    key = await with_key(one, concurrency=2)
    pair = [await with_key(one, tenant="acme") for _ in range(2)]
    assert (await one.client.put("/v1/tenants/acme", json={"concurrency": 1})).status_code == 200
    held = [asyncio.create_task(one.complete(headers=headers)) for headers in (key, key, pair[0])]
    await one.until(lambda: len(one.gateway.registry.nodes()[0].jobs) == 3)
    refused(await one.complete(headers=key), "concurrency")
    refused(await one.complete(headers=pair[1]), "concurrency")
    for task in held:
        task.cancel()
    await one.until(lambda: not one.gateway.registry.nodes()[0].jobs)
    again = asyncio.create_task(one.complete(headers=pair[1]))
    await one.until(lambda: len(one.gateway.registry.nodes()[0].jobs) == 1)
    again.cancel()
    assert (await one.client.delete("/v1/tenants/acme")).status_code == 200
    assert (await one.client.delete("/v1/tenants/acme")).status_code == 404


async def test_a_request_that_is_refused_for_another_reason_takes_no_place_and_no_tokens(stage: Open) -> None:
    one = await stage()
    await one.pair()
    key = await with_key(one, concurrency=1, tokens_per_minute=600)
    for body in ({"model": "other"}, {"prompt": 5}, {"temperature": 9}):
        assert (await one.complete(headers=key, **body)).status_code in (400, 404)
    assert (await one.complete(headers=key)).status_code == 200


async def test_the_rate_that_a_hammering_client_gets_is_its_limit(stage: Open) -> None:
    one = await stage()
    await one.pair()
    key = await with_key(one, requests_per_minute=1200)
    loop = asyncio.get_running_loop()
    began, done = loop.time(), 0
    while loop.time() < began + 4.0:
        done += (await one.complete(headers=key)).status_code == 200
    elapsed = loop.time() - began
    assert done <= (20 * elapsed + 60) * 1.01
    assert done >= 20 * elapsed * 0.8


@pytest.mark.parametrize(
    ("field", "value"), [("requests_per_minute", 0), ("tokens_per_minute", -1), ("concurrency", 1 << 50)]
)
async def test_limits_that_cannot_be_are_refused_by_name(stage: Open, field: str, value: int) -> None:
    one = await stage()
    answer = await one.client.post("/v1/keys", json={"role": "admin", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    answer = await one.client.put("/v1/tenants/acme", json={field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_limits_are_shown_with_their_key_and_tenant(stage: Open) -> None:
    one = await stage()
    await with_key(one, requests_per_minute=60, concurrency=3)
    shown = (await one.client.get("/v1/keys")).json()["keys"][1]
    assert (shown["requests_per_minute"], shown["tokens_per_minute"], shown["concurrency"]) == (60, None, 3)
    await one.client.put("/v1/tenants/acme", json={"weight": 3, "tokens_per_minute": 1000})
    tenant = {"name": "acme", "weight": 3.0, "requests_per_minute": None, "tokens_per_minute": 1000}
    assert (await one.client.get("/v1/tenants")).json() == {"tenants": [tenant | {"concurrency": None}]}
    assert (await one.client.put("/v1/tenants/acme", json={"weight": 0})).json()["error"]["param"] == "weight"
    assert (await one.client.get("/v1/status")).json()["queue"]["queue"] == 1000
