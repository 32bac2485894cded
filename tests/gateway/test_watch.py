"""``prfaas status --watch``, the names and labels of metrics, and the commands that change keys."""

from __future__ import annotations

import asyncio
import io
import re
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from gateway.cli import main
from gateway.commands.client import Api
from gateway.commands.watch import Look, rates, watch
from gateway.keys import Role as KeyRole
from kvcache.wire import Role
from tests.gateway.conftest import Open

KNOWN = (
    "prfaas_requests_total",
    "prfaas_request_duration_seconds_bucket",
    "prfaas_time_to_first_token_seconds_bucket",
    "prfaas_inter_token_latency_seconds_bucket",
    "prfaas_request_queue_time_seconds_bucket",
    "prfaas_num_requests_running",
    "prfaas_num_requests_waiting",
    "prfaas_kv_cache_usage_perc",
    "prfaas_disagg_decision_total",
    "prfaas_pd_kv_transfer_bytes_total",
    "prfaas_pd_kv_transfer_seconds_bucket",
    "prfaas_pd_kv_transfer_exposed_seconds_bucket",
    "prfaas_kv_cache_index_blocks",
    "prfaas_kv_cache_index_hits_total",
    "prfaas_cb_state",
    "prfaas_retries",
    "prfaas_fallbacks",
    "prfaas_prompt_tokens_total",
    "prfaas_generation_tokens_total",
    "prfaas_cached_tokens_total",
)


async def test_metrics_have_the_names_that_operators_know_and_no_label_grows_with_requests(stage: Open) -> None:
    one = await stage()
    await one.pair("east")

    async def series() -> set[str]:
        text = (await one.client.get("/metrics")).text
        found = {line.rsplit(" ", 1)[0] for line in text.splitlines() if line and not line.startswith("#")}
        assert not re.search(r'="[^"]{64,}"', text)
        families = text.replace("# TYPE ", "\n")
        for name in KNOWN:
            assert name in families, name
        return found

    await one.complete(60)
    await one.complete(3)
    before = await series()
    for n in range(5):
        await one.complete(3 + n, headers={"x-request-id": f"r{n}", "x-session-id": f"s{n}"})
    assert await series() == before


async def test_watch_shows_nodes_links_queue_and_rates(stage: Open) -> None:
    one = await stage()
    await one.pair("east")
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True)
    watching = asyncio.create_task(asyncio.to_thread(watch, Api(one.url, None, None), 0.3, console, 3))
    while not watching.done():
        await one.complete(3)
        await asyncio.sleep(0.02)
    await watching
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for text in ("ready", "p-east", "prefill", "east", "accepting", "requests are served", "tokens/s"):
        assert text in shown
    assert re.search(r"[1-9][\d.,]* requests/s", shown), "the counters grew between two looks"


async def test_watch_goes_on_while_a_gateway_is_away() -> None:
    out = io.StringIO()
    await asyncio.to_thread(watch, Api("http://127.0.0.1:9", None, None), 0.01, Console(file=out, width=200), 2)
    assert "asking again" in out.getvalue()


def test_rates_are_not_told_where_counters_began_anew() -> None:
    old, new = (Look(at, {}, {"prfaas_requests_total": count}) for at, count in ((0.0, 9.0), (2.0, 1.0)))
    assert rates(None, new)["requests/s"] is None
    assert rates(old, new)["requests/s"] is None
    assert rates(Look(0.0, {}, {}), new)["requests/s"] == 0.5


async def test_limits_of_a_key_are_given_changed_and_lifted_by_commands(stage: Open) -> None:
    one = await stage()
    await one.node("d", Role.DECODE)
    _, root = one.gateway.keys.create("root", KeyRole.ADMIN)

    async def run(*arguments: str, fails: bool = False) -> Any:
        options = ("--gateway", one.url, "--key", root)
        done = await asyncio.to_thread(CliRunner().invoke, main, ["keys", *arguments, *options])
        assert (done.exit_code != 0) == fails, done.output
        return done.output

    await run("create", "--role", "client", "--model", "tiny", "--token-budget", "500", "--expires-in-days", "2")
    entry = next(entry for entry in one.gateway.keys.entries() if entry.principal.role is KeyRole.CLIENT)
    limits = entry.principal.limits
    assert (limits.models, limits.token_budget) == (frozenset({"tiny"}), 500)
    told = await run("set", entry.id, "--rate", "60", "--lift", "expiry", "--lift", "model", "--cluster", "east")
    assert "60 requests/min" in told
    changed = next(found for found in one.gateway.keys.entries() if found.id == entry.id).principal
    assert (changed.limits.models, changed.limits.expires, changed.limits.token_budget) == (None, None, 500)
    assert (changed.clusters, changed.limits.requests_per_minute) == (frozenset({"east"}), 60)
    listed = await run("list")
    assert "0 of 500 tokens used" in listed
    assert "nothing to change" in await run("set", entry.id, fails=True)
    assert "say one of both" in await run("set", entry.id, "--rate", "5", "--lift", "rate", fails=True)


@pytest.mark.parametrize("options", [("--watch", "--json"), ("--watch", "--every", "0")])
def test_watch_refuses_what_makes_no_sense(options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, ["status", *options])
    assert done.exit_code == 2
