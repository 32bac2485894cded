"""``prfaas profile`` against nodes that take known times, and from a decision log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.keys import Role as KeyRole
from gateway.observations import LogUnreadable, observed, records_in
from gateway.traffic import TrafficMeter
from kvcache.control import GenerateJob, PrefillDone, PrefillJob, PrefillStarted
from kvcache.wire import Role
from scheduler.measured import Measured
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, delta, finish, receive_kv, transfer_of

FIXED_S, TOKEN_S, STEP_S = 0.004, 2e-4, 0.002
MARK = {"x-prfaas-measure": "1"}
SHORT = ("--longest", "256", "--lengths", "3", "--repeats", "1", "--within", "20")


async def prefill(node: FakeNode, job: PrefillJob) -> None:
    """As long as its prompt makes it, by its own word."""
    transfer, tokens = transfer_of(node, job.ticket), len(job.token_ids) - 1
    await node.send(PrefillStarted(transfer))
    await node.send(PrefillDone(transfer, FIXED_S + TOKEN_S * tokens, tokens))


async def answer(node: FakeNode, job: GenerateJob) -> None:
    """As many tokens as were asked for, a step apart."""
    await receive_kv(node, job)
    for _ in range(job.sampling.max_tokens):
        await asyncio.sleep(STEP_S)
        await node.send(delta(job, 300, "t "))
    await finish(node, job, "length", job.sampling.max_tokens)


async def opened(stage: Open) -> Stage:
    gate = await stage(request_timeout_s=20.0)
    gate.register("east")
    for cluster in ("local", "east"):
        await gate.node(f"p-{cluster}", Role.PREFILL, cluster=cluster, on_prefill=prefill)
    await gate.node("d", Role.DECODE, on_generate=answer)
    return gate


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the long-term controller would be told of: lengths that came, and pieces of answers."""
    seen: list[object] = []
    monkeypatch.setattr(TrafficMeter, "arrived", lambda self, tokens: seen.append(tokens))
    monkeypatch.setattr(TrafficMeter, "spoke", lambda self, answer, tokens, now: seen.append(tokens))
    return seen


async def prfaas(*arguments: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, main, ["profile", *arguments])


async def test_a_stack_is_measured_and_that_is_no_traffic(stage: Open, tmp_path: Path, counted: list[object]) -> None:
    gate, out = await opened(stage), tmp_path / "profile.json"
    done = await prfaas("--gateway", gate.url, "--out", str(out), *SHORT)
    assert done.exit_code == 0, done.output
    found = Measured.of(out.read_bytes())
    assert (found.home.name, found.home.nodes, found.decode_nodes) == ("local", 1, 1)
    assert [site.name for site in found.clusters] == ["east"]
    for site in (found.home, *found.clusters):
        assert site.prefill.seconds(0, 200) == pytest.approx(FIXED_S + TOKEN_S * 200, rel=0.01)
    assert len(found.step_s) == 1 + 8
    assert STEP_S <= found.step_s[1] < 50 * STEP_S
    assert counted == []
    prompts = [job.token_ids for node in gate.nodes for job in node.jobs(GenerateJob)]
    assert len({prompt[:64] for prompt in prompts}) == len(prompts)
    records = (await gate.client.get("/v1/decisions?limit=1000")).json()["decisions"]
    assert all(record["measures"] for record in records)


async def test_a_prefill_whose_node_says_too_late_how_long_it_took_is_measured_again(
    stage: Open, tmp_path: Path
) -> None:
    gate, out, lengths = await stage(request_timeout_s=20.0), tmp_path / "profile.json", set[int]()

    async def late_at_first(node: FakeNode, job: PrefillJob) -> None:
        if len(job.token_ids) not in lengths:
            lengths.add(len(job.token_ids))
            await asyncio.sleep(0.2)
        await prefill(node, job)

    await gate.node("p-local", Role.PREFILL, on_prefill=late_at_first)
    await gate.node("d", Role.DECODE, on_generate=answer)
    done = await prfaas("--gateway", gate.url, "--out", str(out), *SHORT)
    assert done.exit_code == 0, done.output
    assert Measured.of(out.read_bytes()).home.prefill.seconds(0, 200) == pytest.approx(
        FIXED_S + TOKEN_S * 200, rel=0.01
    )


async def test_only_a_planner_may_measure_and_choose_the_way(stage: Open) -> None:
    gate = await opened(stage)
    keys = {role: gate.gateway.keys.create(role.value, role)[1] for role in _roles()}
    said = {}
    for role, secret in keys.items():
        headers = MARK | {"authorization": f"Bearer {secret}", "x-prfaas-route-hint": "east"}
        said[role.value] = (await gate.complete(headers=headers)).status_code
    assert said == {"client": 403, "operator": 403, "planner": 200, "admin": 200}
    assert (await gate.complete(headers={"authorization": f"Bearer {keys[_roles()[2]]}"})).status_code == 403


def _roles() -> list[KeyRole]:
    return [KeyRole.CLIENT, KeyRole.OPERATOR, KeyRole.PLANNER, KeyRole.ADMIN]


async def test_traffic_without_the_mark_is_observed(stage: Open, counted: list[int]) -> None:
    gate = await opened(stage)
    await gate.complete(max_tokens=3)
    _, *spoken = counted
    assert sum(spoken) == 3


async def test_a_decision_log_makes_the_same_profile(stage: Open, tmp_path: Path) -> None:
    gate, out = await opened(stage), tmp_path / "profile.json"
    assert (await prfaas("--gateway", gate.url, "--out", str(out), *SHORT)).exit_code == 0
    records = (await gate.client.get("/v1/decisions?limit=1000")).json()
    whole, lines = tmp_path / "whole.json", tmp_path / "log.jsonl"
    whole.write_text(json.dumps(records))
    lines.write_text("\n".join(json.dumps(record) for record in records["decisions"]))
    for log in (whole, lines):
        done = await prfaas("--from-log", str(log), "--json", "--batch", "4")
        assert done.exit_code == 0, done.output
        found = Measured.of(done.stdout.encode())
        assert found.source == "log"
        assert len(found.step_s) == 5
        assert found.home.prefill.seconds(0, 200) == pytest.approx(FIXED_S + TOKEN_S * 200, rel=0.01)


async def test_a_stack_that_cannot_be_measured_is_refused(stage: Open) -> None:
    gate = await stage()
    assert "not ready" in (await prfaas("--gateway", gate.url)).output
    await opened_nodes(gate)
    assert "--longest: 9000 tokens" in (await prfaas("--gateway", gate.url, "--longest", "9000")).output


async def opened_nodes(gate: Stage) -> None:
    await gate.node("p-local", Role.PREFILL, on_prefill=prefill)
    await gate.node("d", Role.DECODE, on_generate=answer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no decision records"),
        ("nonsense", "line 1"),
        ("[1]", "line 1: a decision record is an object"),
        ('{"a": 1}', "no decision records"),
        ('{"decisions": [1]}', "no decision records"),
        ('{"attempts": [], "outcome": "failed"}', "records: none of them"),
    ],
)
async def test_a_file_that_is_no_log_is_refused(text: str, said: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    done = await prfaas("--from-log", str(log))
    assert done.exit_code == 2
    assert said in done.output


def test_a_record_that_lacks_a_field_is_named() -> None:
    record = {"id": "r1", "request_id": "r1", "outcome": "finished", "fallback": False, "ttft_s": 1.0, "attempts": []}
    with pytest.raises(LogUnreadable, match="record r1: lacks 'decision'"):
        observed(records_in(json.dumps(record)))
