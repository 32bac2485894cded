"""What-if over HTTP and on the command line: answered by a worker, bounded, refused by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.errors import ApiError
from gateway.keys import Role as KeyRole
from gateway.what_if import WhatIf
from gateway.what_if_worker import Task
from scheduler.controller.settings import Mode
from scheduler.values import PolicyValues
from scheduler.what_if.basis import case_study
from scheduler.what_if.question import Question
from tests.gateway.conftest import Open
from tests.gateway.test_rebalance_cli import prfaas
from tests.gateway.test_rebalancing import looped

PRESET = {"preset": "case-study", "requests": 300, "rate": 2.0}


async def test_a_preset_is_answered_with_its_progress(stage: Open) -> None:
    one = await stage()
    lines = []
    async with one.client.stream(
        "POST", "/v1/plans/what-if", json=PRESET, headers={"accept": "application/x-ndjson"}
    ) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(json.loads(line))
    shares = [line["progress"] for line in lines[:-1]]
    assert shares == sorted(shares)
    found = lines[-1]["answer"]
    assert [case["name"] for case in found["cases"]] == ["today", "unbalanced", "rebalanced"]
    assert found["cases"][0]["model"]["point"]["prefill"] == [3]
    assert found["cases"][0]["simulation"]["requests"] > 200


async def test_a_gateways_own_traffic_is_asked_about(stage: Open) -> None:
    loop, *_ = await looped(stage, Mode.OBSERVE)
    body = {"requests": 300, "traffic_scale": 2.0, "add_nodes": {"local": 1}}
    early = await loop.stage.client.post("/v1/plans/what-if", json=body)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "not_yet_known")
    for _ in range(70):
        await loop.stage.complete(3)
    shown = await prfaas(loop.stage, "plan", "what-if", "--add-nodes", "1", "--traffic-scale", "2", "--requests", "300")
    assert shown.exit_code == 0, shown.output
    assert "simulated: TTFT P90" in shown.output
    told = await prfaas(loop.stage, "plan", "what-if", "--add-nodes", "1", "--requests", "300", "--json")
    cases = json.loads(told.stdout)["cases"]
    assert sum(cases[0]["model"]["point"]["prefill"] + cases[0]["model"]["point"]["decode"]) == 3
    assert sum(cases[2]["model"]["point"]["prefill"] + cases[2]["model"]["point"]["decode"]) == 4


async def test_what_cannot_be_asked_is_refused_by_name(stage: Open) -> None:
    one = await stage()

    async def refused(**body: Any) -> tuple[int, str, str]:
        answer = await one.client.post("/v1/plans/what-if", json=PRESET | body)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]

    assert (await refused(nodes=3))[2] == "Object contains unknown field `nodes`"
    assert (await refused(traffic_scale=0))[:2] == (400, "traffic_scale")
    assert (await refused(requests=10**7))[:2] == (400, "requests")
    assert (await refused(add_nodes={"east": "many"}))[0] == 400
    status, param, message = await refused(add_nodes={"east": 1})
    assert (status, param) == (400, "add_nodes.east")
    assert "there are local, remote" in message
    one.gateway.keys.create("root", KeyRole.ADMIN)
    _, operator = one.gateway.keys.create("olly", KeyRole.OPERATOR)
    one.client.headers["authorization"] = f"Bearer {operator}"
    assert (await one.client.post("/v1/plans/what-if", json=PRESET)).status_code == 403


def task(**changes: Any) -> Task:
    return Task(case_study(), Question(**{"requests": 20_000, "rate": 2.5} | changes), PolicyValues())


async def test_a_second_question_waits_for_no_processor_and_leaving_ends_the_first() -> None:
    what_if = WhatIf()
    first = what_if.lines(task())
    assert "progress" in await anext(first)
    with pytest.raises(ApiError) as busy:
        await anext(what_if.lines(task()))
    assert (busy.value.status, busy.value.retry_after_s) == (429, 5)
    await first.aclose()  # its reader has left
    short = [line async for line in what_if.lines(task(requests=200))]
    assert "answer" in short[-1]


async def test_a_question_that_takes_too_long_is_ended() -> None:
    async def all_of() -> None:
        async for _ in WhatIf(deadline_s=1.0).lines(task(requests=100_000)):
            pass

    async with asyncio.timeout(10):
        with pytest.raises(ApiError) as late:
            await all_of()
    assert (late.value.status, late.value.param) == (504, "requests")


async def test_the_deadline_holds_whoever_reads_the_lines() -> None:
    lines = WhatIf(deadline_s=5.0).lines(task(requests=100_000))
    assert "progress" in await anext(lines)

    async def rest() -> None:
        async for _ in lines:
            pass

    async with asyncio.timeout(15):
        with pytest.raises(ApiError) as late:
            await asyncio.create_task(rest())
    assert late.value.status == 504


async def test_who_asks_for_one_answer_and_leaves_keeps_nobody_else_waiting(stage: Open) -> None:
    one = await stage()
    with pytest.raises(httpx.ReadTimeout):
        await one.client.post("/v1/plans/what-if", json=PRESET | {"requests": 100_000}, timeout=2.0)
    async with asyncio.timeout(4):
        while (await one.client.post("/v1/plans/what-if", json=PRESET)).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["plan", "what-if", "--preset", "case-study", "--requests", "300", *arguments])


def test_a_preset_needs_no_gateway() -> None:
    done = run("--rate", "2", "--link-gbps", "20", "--price", "remote=0.02", "--prefill-price", "0.001", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["question"]["prices"] == {
        "remote": {"egress_per_gb": 0.02, "prefill_per_s": 0.0, "by_hour": []},
        "*": {"egress_per_gb": 0.0, "prefill_per_s": 0.001, "by_hour": []},
    }
    assert "no price" in run("--rate", "2").output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--add-nodes", "west=1"), "add_nodes.west: no cluster has that name"),
        (("--add-nodes", "1.5"), "--add-nodes 1.5: give a whole number"),
        (("--link-gbps", "fast"), "--link-gbps fast: give a number"),
        (("--add-nodes", "nan"), "--add-nodes nan: give a number"),
        (("--add-nodes", "local=inf"), "--add-nodes local=inf: give a number"),
        (("--traffic-scale", "0"), "traffic_scale: must be above 0"),
        (("--rate", "1e300"), "rate: must be above 0 and at most"),
        (("--rate", "1e-300"), "traffic: it lasts"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: tuple[str, ...], sentence: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.output.startswith(f"Error: {sentence}")) == (2, True), done.output


async def test_the_report_is_written_where_it_is_wanted(stage: Open, tmp_path: Path) -> None:
    one = await stage()
    page = tmp_path / "report.html"
    done = await prfaas(one, "report", "rebalancing", "-o", str(page), "--since", "1h", "--tpot-goal-ms", "25")
    assert done.exit_code == 0, done.output
    assert page.read_text().startswith("<!doctype html>")
    told = await prfaas(one, "report", "rebalancing", "--format", "csv")
    assert told.stdout.startswith("figure,value\n")
    wrong = await prfaas(one, "report", "rebalancing", "--since", "yesterday")
    assert (wrong.exit_code, "give a span such as 30m" in wrong.output) == (2, True)
    assert json.loads((await prfaas(one, "report", "rebalancing", "--json")).stdout)["window"]["requests"] == 0
    one.gateway.keys.create("root", KeyRole.ADMIN)  # from now on a key is asked for
    refused = await prfaas(one, "report", "rebalancing", "-o", str(page))
    assert refused.exit_code == 1
    assert page.read_text().startswith("<!doctype html>")  # the earlier one is whole
