"""The operator's commands for roles and proposals, against a gateway in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from click.testing import CliRunner

from gateway.cli import main
from scheduler.controller.settings import Mode
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import failing
from tests.gateway.test_conversions import three
from tests.gateway.test_rebalancing import looped


async def prfaas(stage: Stage, *arguments: str) -> Any:
    call = [*arguments, "--gateway", stage.url]
    return await asyncio.to_thread(CliRunner().invoke, main, call, prog_name="prfaas")


async def test_a_conversion_is_seen_through_and_its_failure_is_an_exit_status(stage: Open) -> None:
    one = await stage()
    _, _, d2 = await three(one)
    done = await prfaas(one, "nodes", "convert", "d2", "--to", "prefill", "--json")
    assert (done.exit_code, json.loads(done.output)["phase"]) == (0, "done")
    listed = await prfaas(one, "nodes", "list", "--json")
    assert [n["role"] for n in json.loads(listed.output)["nodes"]] == ["decode", "prefill", "prefill"]
    d2.on_generate = failing("decode", "engine_lost")
    back = await prfaas(one, "nodes", "convert", "d2", "--to", "decode")
    assert (back.exit_code, "put back: d2 from prefill to decode" in back.output) == (1, True)
    unknown = await prfaas(one, "nodes", "convert", "nobody", "--to", "decode")
    assert (unknown.exit_code, unknown.output) == (1, "Error: no node is named 'nobody'\n")
    begun = await prfaas(one, "nodes", "convert", "d2", "--to", "decode", "--no-wait")
    assert (begun.exit_code, "converting d2" in begun.output) == (0, True)


async def test_proposals_are_shown_approved_and_refused(stage: Open) -> None:
    empty = await prfaas(await stage(), "plan", "proposals")
    assert "too little traffic" in empty.output
    assert "no proposals" in empty.output
    loop, *_ = await looped(stage, Mode.ADVISE)
    shown = await prfaas(loop.stage, "plan", "proposals")
    assert shown.exit_code == 0
    assert "1 : 2" in shown.output
    assert "2 : 1" in shown.output
    number = json.loads((await prfaas(loop.stage, "plan", "proposals", "--json")).output)["proposals"][0]["number"]
    refused = await prfaas(loop.stage, "plan", "refuse", str(number))
    assert f"proposal {number} is refused by loopback" in refused.output
    late = await prfaas(loop.stage, "plan", "approve", str(number))
    assert late.exit_code == 1
    assert "is not open" in late.output
