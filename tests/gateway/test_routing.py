"""What routing keeps to in a running gateway: residency, trust, sessions, observe mode, records that can be decided
again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.clusters import Dial
from gateway.commands.terms import hours
from gateway.terms import ClusterTerms
from kvcache.control import GenerateJob, PrefillJob
from kvcache.wire import Role
from scheduler.facts import Prices
from scheduler.replay import SCHEMA, replay
from scheduler.values import PolicyValues
from tests.gateway.conftest import Open, Stage

LONG = 60
"""Words of a prompt that is above the threshold of the stage."""


async def keyed(one: Stage, **limits: Any) -> dict[str, str]:
    """A client key with route hints and these limits; an admin key is made first."""
    made = await one.client.post("/v1/keys", json={"role": "admin"})
    if made.status_code == 201:
        one.client.headers["authorization"] = f"Bearer {made.json()['key']}"
    body = {"role": "client", "route_hint": True} | limits
    client = await one.client.post("/v1/keys", json=body)
    assert client.status_code == 201, client.text
    return {"authorization": f"Bearer {client.json()['key']}"}


async def both(one: Stage, east: ClusterTerms = ClusterTerms()) -> None:  # noqa: B008
    one.gateway.registry.register("east", Dial.IN, terms=east)
    await one.node("p-east", Role.PREFILL, cluster="east")
    await one.node("p-local", Role.PREFILL)
    await one.node("d", Role.DECODE)


@pytest.mark.parametrize(
    "limits",
    [
        {"regions": ["home"]},
        {"barred": ["east"]},
        {"trusted_only": True},
        {"share_cache": True},
        {"clusters": []},
    ],
)
async def test_a_prompt_that_may_not_leave_stays_and_no_hint_moves_it(stage: Open, limits: dict[str, Any]) -> None:
    one = await stage()
    await both(one, ClusterTerms("far"))
    assert (await one.client.patch("/v1/clusters/local", json={"region": "home"})).status_code == 200
    key = await keyed(one, **limits)
    plain = await one.complete(words=LONG, headers=key)
    assert plain.headers["x-prfaas-route"] == "local"
    for hint in ("remote", "east"):
        hinted = await one.complete(words=LONG, headers=key | {"x-prfaas-route-hint": hint})
        assert (hinted.status_code, hinted.json()["error"]["code"]) == (503, "hinted_cluster_unavailable")
    [remote] = [node for node in one.nodes if node.name == "p-east"]
    assert remote.jobs(PrefillJob) == []


async def test_a_cluster_in_the_region_and_trusted_is_reached(stage: Open) -> None:
    one = await stage()
    await both(one, ClusterTerms("home", trusted=True))
    await one.client.patch("/v1/clusters/local", json={"region": "home"})
    key = await keyed(one, regions=["home"], trusted_only=True)
    assert (await one.complete(words=LONG, headers=key)).headers["x-prfaas-route"] == "remote:east"


async def test_a_key_whose_prompts_may_not_be_here_is_refused_whatever_the_hint(stage: Open) -> None:
    one = await stage()
    await both(one, ClusterTerms("far"))
    key = await keyed(one, regions=["far"])
    for hint in ({}, {"x-prfaas-route-hint": "east"}):
        refused = await one.complete(words=LONG, headers=key | hint)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "residency")
    assert all(not node.jobs(PrefillJob) and not node.jobs(GenerateJob) for node in one.nodes)


async def test_caches_are_of_a_tenant(stage: Open) -> None:
    one = await stage()
    _, decode = await one.pair()
    acme = {"tenant": "acme"}
    for limits in ({}, acme, acme, {"share_cache": True}):
        assert (await one.complete(headers=await keyed(one, **limits))).status_code == 200
    salts = [job.salt for job in decode.jobs(GenerateJob)]
    assert salts[1:] == ["acme", "acme", ""]
    assert salts[0] not in salts[1:]


async def test_a_session_goes_on_where_it_began(stage: Open) -> None:
    one = await stage()
    await one.pair()
    for name in ("p-a", "p-z"):
        await one.node(name, Role.PREFILL)
    first = await one.decision((await one.complete(headers={"x-session-id": "s1"})).headers["x-request-id"])
    served = {first["attempts"][0]["prefill_node"], first["attempts"][0]["decode_node"]}
    for session, expected in (("s1", served), ("s2", set())):
        answer = await one.complete(headers={"x-session-id": session})
        record = await one.decision(answer.headers["x-request-id"])
        assert set(record["decision"]["facts"]["request"]["session_nodes"]) == expected
    refused = await one.complete(headers={"x-session-id": "a b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-session-id")


async def test_observe_mode_sends_nothing_away_and_records_what_it_would_have_done(stage: Open) -> None:
    one = await stage(policy=PolicyValues(observe=True))
    await both(one)
    answer = await one.complete(words=LONG)
    assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-route-reason"]) == ("local", "observe_mode")
    record = await one.decision(answer.headers["x-request-id"])
    assert record["decision"]["would_choose"]["cluster"] == "east"


async def test_what_a_prediction_was_off_by_is_learnt_from_the_first_token(stage: Open) -> None:
    one = await stage()
    await both(one)
    for _ in range(3):
        assert (await one.complete(words=LONG)).status_code == 200
    view = (await one.client.get("/v1/clusters/local")).json()
    assert view["ttft_ratio"] > 0
    decision = (await one.client.get("/v1/decisions")).json()["decisions"][0]
    assert decision["decision"]["facts"]["clusters"][0]["ttft_ratio"] > 0


async def test_terms_of_a_cluster_are_set_piece_by_piece_and_checked(stage: Open) -> None:
    one = await stage()
    one.register("east")
    await one.client.patch("/v1/clusters/east", json={"region": "eu", "prices": {"egress_per_gb": 0.05}})
    view = (await one.client.patch("/v1/clusters/east", json={"trusted": True})).json()
    assert (view["region"], view["trusted"], view["prices"]["egress_per_gb"]) == ("eu", True, 0.05)
    bad = await one.client.patch("/v1/clusters/east", json={"prices": {"by_hour": [1.0]}})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prices.by_hour")
    assert (await one.client.patch("/v1/clusters/nowhere", json={})).status_code == 404


@pytest.mark.parametrize("kept", ["memory", "disk"])
async def test_all_records_are_exported_as_lines_and_decided_again_to_the_same_bytes(
    stage: Open, tmp_path: Path, kept: str
) -> None:
    one = await stage(state_file=None if kept == "memory" else tmp_path / "state.db")
    await both(one)
    for words in (1, 3, LONG, 2 * LONG):
        assert (await one.complete(words=words)).status_code == 200
    assert (await one.complete(words=LONG, headers={"x-prfaas-route-hint": "east"})).status_code == 200
    answer = await one.client.get("/v1/decisions/export")
    assert answer.headers["content-type"] == "application/jsonl"
    lines = answer.content.splitlines()
    assert [json.loads(line)["schema"] for line in lines] == [SCHEMA] * 5
    assert json.loads(lines[0])["usage"]["prompt_tokens"] < 10 < json.loads(lines[-1])["usage"]["prompt_tokens"]
    assert all(one.same for line in lines for one in replay(line))
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(answer.content)
    done = CliRunner().invoke(main, ["decisions", "replay", str(file)])
    assert (done.exit_code, "5 decisions are the same, 0 differ" in done.output) == (0, True)
    file.write_bytes(answer.content.replace(b'"above_threshold"', b'"below_threshold"') + b'{"id": "old"}\n')
    done = CliRunner().invoke(main, ["decisions", "replay", str(file)])
    assert done.exit_code == 1
    assert "differs from byte" in done.output
    assert "a record of schema 1 cannot be decided again" in done.output


OLD_OPTION = {
    "cluster": "east",
    "prefill_node": "p-east",
    "decode_node": "d",
    "compute_increment": 1604,
    "transfer_bytes": 12_771_328,
    "codec": "lossless",
    "allowed": True,
    "predicted_ttft_s": 1.8,
    "quality": "exact",
    "wire_bytes": 8_535_000,
    "codec_s": 0.01,
    "codecs": [],
}
OLD_RECORD = {
    "id": "old",
    "request_id": "long-ago",
    "at": 1.7e9,
    "endpoint": "/v1/completions",
    "decision": {
        "chosen": OLD_OPTION,
        "reason": "above_threshold",
        "options": [OLD_OPTION],
        "facts": {
            "request": {"request_id": "old", "prompt_tokens": 1605, "transfer_bytes": 12_771_328, "quality": "exact"},
            "clusters": [],
            "decode_nodes": [],
            "threshold_tokens": 1000,
        },
    },
    "fallback_decision": None,
    "attempts": [],
    "route": "remote:east",
    "fallback": False,
    "outcome": "finished",
    "ttft_s": 1.9,
    "tokens_per_s": 18.0,
    "usage": None,
    "finish": "length",
}
"""As a gateway of schema 1 kept it."""


async def test_records_of_an_older_gateway_are_still_explained_and_listed(stage: Open) -> None:
    one = await stage()
    one.gateway.decisions.add(OLD_RECORD)
    for arguments, said in (
        (("explain", "long-ago"), "east: more uncached tokens than the threshold"),
        (("decisions", "list"), "long-ago"),
        (("decisions", "export"), '"request_id":"long-ago"'),
    ):
        done = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--gateway", one.url])
        assert (done.exit_code, said in done.output) == (0, True), done.output


async def test_explain_shows_cost_price_and_why_a_way_is_not_allowed(stage: Open) -> None:
    one = await stage()
    await both(one, ClusterTerms(prices=Prices(prefill_per_s=5.0)))
    link = one.gateway.registry.link("east")
    for _ in range(4):
        assert (await one.complete(words=LONG)).status_code == 200
    link.observe(10**6, 10.0, 10.0, asyncio.get_running_loop().time())
    answer = await one.complete(words=LONG)
    name = answer.headers["x-request-id"]
    done = await asyncio.to_thread(CliRunner().invoke, main, ["explain", name, "--gateway", one.url])
    assert done.exit_code == 0
    assert all(word in done.output for word in ("waiting", "price", "cost"))
    record = await one.decision(name)
    [east] = [option for option in record["decision"]["options"] if option["cluster"] == "east"]
    assert ("no, slower than the local way" in done.output) == (east["barred"] == "slower_than_local")


@pytest.mark.parametrize(
    ("text", "hour", "factor"),
    [("22-6=0.5", 23, 0.5), ("22-6=0.5", 5, 0.5), ("22-6=0.5", 6, 1.0), ("0-24=2,12-13=3", 12, 3.0), ("", 0, 1.0)],
)
def test_hours_of_prices_pass_midnight_and_later_parts_win(text: str, hour: int, factor: float) -> None:
    assert hours(text)[hour] == factor


@pytest.mark.parametrize("text", ["6=1", "25-3=1", "1-2", "1-2=x", "1-25=1", "1-2=1.2.3"])
def test_hours_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        hours(text)


async def test_a_cluster_is_registered_and_changed_from_the_command_line(stage: Open) -> None:
    one = await stage()
    for arguments in (
        ("register", "east", "--region", "eu", "--trusted", "--egress-price", "0.05", "--price-hours", "0-12=0.5"),
        ("set", "east", "--not-trusted", "--prefill-price", "0.001"),
        ("set", "local", "--region", "us"),
    ):
        done = await asyncio.to_thread(CliRunner().invoke, main, ["clusters", *arguments, "--gateway", one.url])
        assert done.exit_code == 0, done.output
    terms = one.gateway.registry.cluster("east").terms
    assert (terms.region, terms.trusted) == ("eu", False)
    assert (terms.prices.egress_per_gb, terms.prices.prefill_per_s, terms.prices.by_hour[11:13]) == (
        0.05,
        0.001,
        (0.5, 1.0),
    )
    assert one.gateway.registry.cluster("local").terms.region == "us"
    nothing = await asyncio.to_thread(CliRunner().invoke, main, ["clusters", "set", "east", "--gateway", one.url])
    assert nothing.exit_code == 2


async def test_an_automatic_threshold_follows_the_best_one_and_a_fixed_one_does_not(stage: Open) -> None:
    for auto, expected in ((True, 5000), (False, 32)):
        one = await stage(threshold_auto=auto)
        rebalancing = one.gateway.rebalancing
        rebalancing.controller.assessment = SimpleNamespace(threshold_best=5000.0)  # type: ignore[assignment]
        rebalancing._follow()
        assert (await one.client.get("/v1/status")).json()["threshold_tokens"] == expected


@pytest.mark.parametrize("threshold", ["-1", "1.5", "automatic", ""])
def test_a_threshold_that_is_neither_a_number_nor_auto_is_refused(threshold: str) -> None:
    done = CliRunner().invoke(main, ["gateway", "--model", "/missing", f"--threshold={threshold}"])
    assert (done.exit_code, "--threshold" in done.output) == (1, True)
