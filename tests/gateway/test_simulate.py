"""``prfaas simulate`` as a planner meets it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli import main

KEYS = (
    "throughput_req_s",
    "sustained",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "ttft_max_s",
    "tpot_p90_s",
    "slo_attainment",
    "egress_gbps",
    "offloaded_share",
    "conversions",
    "outstanding_slope",
)
SAMPLES = Path(__file__).parent.parent / "scheduler" / "simulator" / "samples"


def simulate(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["simulate", "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_promised_figure_is_there_and_equal_seeds_print_the_same() -> None:
    arguments = ("--preset", "case-study", "--policy", "prfaas", "--rate", "2.5", "--requests", "600", "--seed", "7")
    first, again = simulate(*arguments), simulate(*arguments)
    assert first == again
    assert all(key in first for key in KEYS)
    assert first["throughput_req_s"] == pytest.approx(2.5, rel=0.15)
    assert simulate(*arguments[:-1], "8") != first


def test_too_few_requests_decide_nothing_about_what_is_sustained() -> None:
    assert simulate("--policy", "static", "--rate", "1", "--requests", "300")["sustained"] is None


def test_several_seeds_are_shown_one_by_one_and_averaged() -> None:
    found = simulate("--policy", "homogeneous", "--rate", "1", "--requests", "300", "--seeds", "3")
    each = [one["ttft_p50_s"] for one in found["each_seed"]]
    assert len(each) == 3
    assert found["ttft_p50_s"] == pytest.approx(sum(each) / 3, rel=1e-4)


def test_a_trace_is_replayed_with_its_prefixes() -> None:
    trace = ("--trace", str(SAMPLES / "mooncake.jsonl"), "--format", "mooncake", "--speed", "0.5")
    shared, none = simulate(*trace), simulate(*trace, "--store", "none")
    assert shared["cached_share"] > 0 == none["cached_share"]
    assert shared["threshold_tokens"] < 19_000


def test_a_link_that_is_cut_keeps_prompts_at_home() -> None:
    rate = ("--rate", "0.4", "--requests", "400", "--link-gbps", "5", "--late-fallback")
    assert simulate(*rate, "--link-change", "100=0")["offloaded_share"] < 0.3 * simulate(*rate)["offloaded_share"]


def test_requests_and_timeline_are_written_to_files(tmp_path: Path) -> None:
    table, viewer = tmp_path / "requests.csv", tmp_path / "timeline.json"
    simulate("--rate", "2", "--requests", "50", "--csv", str(table), "--timeline", str(viewer))
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == 50
    assert json.loads(viewer.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "--rate is missing"),
        (("--rate", "1", "--prefill", "8"), "decode"),
        (("--rate", "1", "--link-change", "soon"), "SECONDS=GBPS"),
        (("--rate", "1", "--profile", __file__), "--trace"),
        (("--trace", str(SAMPLES / "azure.csv"), "--format", "burstgpt"), "Timestamp"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(arguments: tuple[str, ...], what: str) -> None:
    done = CliRunner().invoke(main, ["simulate", *arguments])
    assert done.exit_code != 0
    assert what in done.output
    assert "Traceback" not in done.output
