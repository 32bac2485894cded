"""The report as people and programs get it: from a gateway with fake nodes, in three forms, and as a page."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from gateway.keys import Role as KeyRole
from gateway.report.csv_text import csv_text
from gateway.report.gathering import Kept
from gateway.report.page import page
from gateway.report.svg import apart, decades, ticks
from scheduler.controller.settings import Mode
from scheduler.report.egress import Site
from scheduler.report.report import make_report
from tests.gateway.conftest import Open, Stage
from tests.gateway.test_rebalancing import looped
from tests.scheduler.report.windows import fleet, inputs, served

NASTY = '<script>alert("1")</script>&\'"'


async def asked(stage: Stage, **query: Any) -> httpx.Response:
    return await stage.client.get("/v1/reports/rebalancing", params=query)


async def test_a_gateway_reports_what_it_served(stage: Open) -> None:
    loop, *_ = await looped(stage, Mode.OBSERVE)
    for words in (3, 40, 3, 40, 3, 3, 3, 3, 3):
        assert (await loop.stage.complete(words)).status_code == 200
    report = (await asked(loop.stage)).json()
    assert report["window"]["requests"] == 9
    assert report["traffic"]["prompts"]["count"] == 9
    assert report["traffic"]["unfinished"] == 0
    assert report["latency"]["unanswered"] == 0
    assert report["mode"] == "observe"
    assert report["capacity"] is None  # nine requests do not show a split to be right or wrong
    assert any("9 requests had something to prefill; below 64" in sentence for sentence in report["unknown"])
    assert report["proposals"][0]["verdict"] == "observed"
    assert [use["name"] for use in report["egress"]["clusters"]] == ["local"]
    later = (await asked(loop.stage, since=time.time() + 60)).json()
    assert later["window"]["requests"] == 0


async def test_enough_traffic_shows_the_split(stage: Open) -> None:
    loop, *_ = await looped(stage, Mode.OBSERVE)
    for _ in range(70):
        await loop.stage.complete(3)
    report = (await asked(loop.stage)).json()
    assert report["capacity"]["requests"] == 70
    assert report["capacity"]["stages"][2]["nodes"] == 2
    form = await asked(loop.stage, format="html")
    assert form.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in form.headers["content-security-policy"]
    assert form.text.count("<svg") == 8  # four plots, each for a wide window and for a narrow one
    rows = list(csv.reader(io.StringIO((await asked(loop.stage, format="csv")).text)))
    assert ["capacity.requests", "70"] in rows


async def test_only_planners_read_it_and_wrong_fields_are_named(stage: Open) -> None:
    one = await stage()
    _, admin = one.gateway.keys.create("root", KeyRole.ADMIN)
    _, planner = one.gateway.keys.create("pat", KeyRole.PLANNER)
    _, operator = one.gateway.keys.create("olly", KeyRole.OPERATOR)
    statuses = []
    for key in (planner, admin, operator, "nobody"):
        one.client.headers["authorization"] = f"Bearer {key}"
        statuses.append((await asked(one)).status_code)
    assert statuses == [200, 200, 403, 401]
    one.client.headers["authorization"] = f"Bearer {planner}"
    for field, value in (("format", "pdf"), ("tpot_goal_ms", -1), ("ttft_factor", 0), ("since", "yesterday")):
        answer = await asked(one, **{field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_decision_record_tells_what_a_report_needs_and_a_broken_one_is_refused() -> None:
    record = {
        "at": 5.0,
        "decision": {
            "facts": {
                "request": {"prompt_tokens": 101, "request_id": "r"},
                "clusters": [
                    {"local": True, "nodes": [{"cached_tokens": 30}, {"cached_tokens": 64}]},
                    {"local": False, "nodes": [{"cached_tokens": 90}]},
                ],
                "decode_nodes": [{"cached_tokens": 10}],
            }
        },
        "attempts": [
            {"cluster": "east", "prefill_s": 2.0, "wire_bytes": 7},
            {"cluster": None},
            {"cluster": "east"},
        ],
        "route": "remote:east",
        "fallback": True,
        "ttft_s": 1.5,
        "tokens_per_s": 40.0,
        "usage": {"prompt_tokens": 101, "completion_tokens": 8, "cached_tokens": 64},
    }
    found = msgspec.convert(record, Kept).served()
    assert found is not None
    assert (found.uncached_tokens, found.cached_tokens, found.output_tokens) == (36, 64, 8)
    assert (found.remote, found.fallback, found.tpot_s, len(found.shipments)) == (True, True, 0.025, 1)
    assert msgspec.convert({"at": 1.0, "decision": None}, Kept).served() is None
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(record | {"at": "long ago"}, Kept)


def nasty() -> Any:
    given = inputs(served(400), fleet(5, threshold=9000.0))
    change = replace(given).conversions[0]
    return make_report(
        replace(
            given,
            sites=(*given.sites, Site(NASTY, False, given.sites[0].prices)),
            conversions=(msgspec.structs.replace(change, node=NASTY, by=NASTY, reason="=HYPERLINK(1)"),),
        )
    )


def test_names_from_outside_are_escaped_everywhere() -> None:
    text = page(nasty(), NASTY)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 4
    assert not re.search(r"\son\w+=", text)
    assert "http" not in text.replace("http-equiv", "")


def test_a_spreadsheet_finds_no_formula() -> None:
    rows = dict(csv.reader(io.StringIO(csv_text(nasty()))))
    assert rows["conversions.0.conversion.reason"] == "'=HYPERLINK(1)"
    assert float(rows["capacity.gain"]) > 1
    assert rows["slo.tpot"] == ""


def test_what_is_unknown_is_on_the_page() -> None:
    empty = page(make_report(inputs([])), "tiny")
    assert "What cannot be said" in empty
    assert "0 requests came in the window" in empty
    assert "<svg" not in empty


def test_the_json_form_has_no_infinities() -> None:
    plain = msgspec.json.encode(make_report(inputs(served(400), fleet(remote=0))))
    json.loads(plain, parse_constant=lambda word: pytest.fail(word))


def test_axes_are_round_and_labels_keep_apart() -> None:
    assert ticks(3.4, 4) == [0.0, 1.0, 2.0, 3.0]
    assert decades(700, 60_000, 10) == [1000, 2000, 5000, 10_000, 20_000, 50_000]
    assert decades(1, 1e7, 8) == [10.0**n for n in range(8)]
    assert apart([50, 52, 51, 300], 18, 0, 100) == [46, 82, 64, 100]
