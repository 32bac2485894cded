"""What a key permits: models, an expiry, a budget of tokens; and changes of that while the key is in use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gateway.budgets import Budgets
from gateway.errors import ApiError
from gateway.keys import KeyBook, Principal, new_secret
from gateway.keys import Role as KeyRole
from gateway.rate_headers import duration
from gateway.state import State
from gateway.terms import KeyLimits
from tests.gateway.conftest import Open, Stage


async def with_key(one: Stage, **fields: Any) -> tuple[str, dict[str, str]]:
    """A client's key made over the API: its id, and the headers of its holder."""
    if not len(one.gateway.keys):
        _, root = one.gateway.keys.create("root", KeyRole.ADMIN)
        one.client.headers["authorization"] = f"Bearer {root}"
    made = await one.client.post("/v1/keys", json={"role": "client"} | fields)
    assert made.status_code == 201, made.text
    return made.json()["id"], {"authorization": f"Bearer {made.json()['key']}"}


async def test_a_key_reaches_the_models_that_it_names_and_sees_no_others(stage: Open) -> None:
    one = await stage()
    await one.pair()
    _, mine = await with_key(one, models=["tiny", "other"])
    _, elsewhere = await with_key(one, models=["other"])
    assert (await one.complete(headers=mine)).status_code == 200
    refused = await one.complete(headers=elsewhere)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert (await one.client.get("/v1/models", headers=elsewhere)).json()["data"] == []
    assert (await one.client.get("/v1/models/tiny", headers=elsewhere)).status_code == 404
    assert (await one.client.post("/tokenize", json={"prompt": "a"}, headers=elsewhere)).status_code == 404
    assert [m["id"] for m in (await one.client.get("/v1/models", headers=mine)).json()["data"]] == ["tiny"]


async def test_a_key_is_worth_nothing_from_its_expiry_on_until_that_is_changed(stage: Open) -> None:
    one = await stage()
    key_id, headers = await with_key(one, expires=time.time() + 3600)
    assert (await one.client.get("/v1/models", headers=headers)).status_code == 200
    path = f"/v1/keys/{key_id}"
    assert (await one.client.patch(path, json={"expires": time.time() - 1})).status_code == 200
    refused = await one.client.get("/v1/models", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "expired_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert (await one.client.patch(path, json={"expires": None})).json()["expires"] is None
    assert (await one.client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_budget_is_used_up_by_prompts_and_answers_and_may_be_raised(stage: Open) -> None:
    one = await stage()
    await one.pair()
    key_id, headers = await with_key(one, token_budget=8)
    used = (await one.complete(headers=headers)).json()["usage"]["total_tokens"]
    assert used >= 8
    refused = await one.complete(headers=headers)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], "retry-after" in refused.headers) == (429, "insufficient_quota", False)
    assert "token_budget" in error["message"]
    assert (await one.client.get("/v1/models", headers=headers)).status_code == 200
    shown = (await one.client.get(f"/v1/keys/{key_id}")).json()
    assert (shown["tokens_used"], shown["token_budget"]) == (used, 8)
    assert (await one.client.patch(f"/v1/keys/{key_id}", json={"token_budget": 1000})).status_code == 200
    assert (await one.complete(headers=headers)).status_code == 200


def test_budgets_outlive_a_gateway_and_add_up_over_two(tmp_path: Path) -> None:
    client = Principal("c", KeyRole.CLIENT, False, limits=KeyLimits(token_budget=100), key_id="k")
    books = [Budgets(State(tmp_path / "state")) for _ in range(2)]
    for book in books:
        book._unwritten["k"] = 30
        book.close()
    assert [book.spent("k") for book in books] == [30, 60]
    later = Budgets(State(tmp_path / "state"))
    assert later.spent("k") == 60
    later.check(client)
    later.forget("k")
    assert Budgets(State(tmp_path / "state")).spent("k") == 0


async def test_a_change_is_in_force_at_once_and_leaves_what_it_does_not_name(stage: Open) -> None:
    one = await stage()
    await one.pair()
    key_id, headers = await with_key(one, requests_per_minute=6, regions=["eu"], clusters=["east"], name="before")
    path = f"/v1/keys/{key_id}"
    changed = (await one.client.patch(path, json={"requests_per_minute": 600, "regions": None, "name": "now"})).json()
    assert (changed["requests_per_minute"], changed["regions"], changed["clusters"]) == (600, None, ["east"])
    assert (changed["name"], changed["role"]) == ("now", "client")
    for _ in range(3):
        assert (await one.complete(headers=headers)).status_code == 200
    for body, param in (
        ({"token_budget": 0}, "token_budget"),
        ({"expires": -1}, "expires"),
        ({"models": "x"}, "models"),
    ):
        refused = await one.client.patch(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await one.client.patch(path, json={})).status_code == 400
    assert (await one.client.patch("/v1/keys/none", json={"name": "x"})).json()["error"]["code"] == "key_not_found"


async def test_answers_say_what_is_left_to_use(stage: Open) -> None:
    one = await stage()
    await one.pair()
    _, headers = await with_key(one, requests_per_minute=1200, tokens_per_minute=60_000)
    told = (await one.complete(headers=headers)).headers
    assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-limit-tokens"]) == ("1200", "60000")
    assert int(told["x-ratelimit-remaining-requests"]) == 59, "of what may come at once: three seconds' worth"
    assert told["x-ratelimit-reset-requests"].endswith("ms")
    assert "x-ratelimit-limit-requests" not in (await one.complete()).headers
    _, slow = await with_key(one, requests_per_minute=6, tokens_per_minute=600)
    assert (await one.complete(headers=slow)).headers["x-ratelimit-remaining-requests"] == "0"
    refused = await one.complete(headers=slow)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert refused.headers.get_list("x-ratelimit-limit-requests") == ["6"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.12, "120ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s"), (425, "7m5s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_key_of_an_admin_key_file_is_made_once_and_alike_on_every_gateway(tmp_path: Path) -> None:
    secret = new_secret()
    one, other = KeyBook(State(tmp_path / "state.db")), KeyBook(State(None))
    for book in (one, one, other, KeyBook(State(tmp_path / "state.db"))):
        book.ensure_admin(secret)
    found = one.find(secret)
    assert found is not None
    assert found.role is KeyRole.ADMIN
    assert [entry.id for entry in one.entries()] == [entry.id for entry in other.entries()]


@pytest.mark.parametrize("weak", ["", "prfaas-short", "x" * 60, "prfaas-" + "a" * 42, "prfaas-" + "a b" * 20])
def test_a_weak_admin_key_is_refused(weak: str) -> None:
    with pytest.raises(ApiError, match="prfaas keys generate"):
        KeyBook(State(None)).ensure_admin(weak)
