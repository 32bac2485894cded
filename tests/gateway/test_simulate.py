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


def test_a_trace_that_is_too_short_decides_nothing_about_what_is_sustained() -> None:
    assert simulate("--trace", str(SAMPLES / "azure.csv"), "--format", "azure")["sustained"] is None


MOONCAKE = ("--trace", str(SAMPLES / "mooncake.jsonl"))
ONE = ("--rate", "1", "--requests", "50")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "--rate is missing"),
        (("--rate", "nan"), "--rate"),
        (("--rate", "inf"), "--rate"),
        (("--rate", "1e-300", "--requests", "50"), "raise the rate"),
        ((*ONE, "--seed", "-1"), "--seed"),
        ((*ONE, "--prefill", "8"), "decode"),
        ((*ONE, "--link-gbps", "nan"), "--link-gbps"),
        ((*ONE, "--conversion-s", "inf", "--roles", "fractional"), "--conversion-s"),
        ((*ONE, "--link-change", "soon"), "SECONDS=GBPS"),
        ((*ONE, "--link-change", "nan=1"), "--link-change nan=1"),
        ((*ONE, "--link-change", "1=nan"), "--link-change 1=nan"),
        ((*ONE, "--csv", "/nowhere/requests.csv"), "--csv /nowhere/requests.csv: No such file"),
        ((*ONE, "--timeline", "/nowhere/spans.json"), "--timeline /nowhere/spans.json: No such file"),
        ((*ONE, "--profile", __file__), "--trace"),
        ((*MOONCAKE, "--profile", __file__), f"--profile {__file__}"),
        ((*ONE, "--format", "azure"), "--format goes with --trace"),
        ((*ONE, "--store-gb", "1"), "--store-gb goes with --trace"),
        ((*ONE, "--cv", "2"), "--cv goes with --arrivals bursty"),
        ((*ONE, "--tpot-budget", "0.2"), "--tpot-budget goes with --roles fractional"),
        ((*MOONCAKE, "--requests", "5"), "--requests is of drawn requests"),
        ((*MOONCAKE, "--rate", "5", "--speed", "2"), "--rate and --speed"),
        (("--trace", str(SAMPLES / "azure.csv"), "--format", "burstgpt"), "azure.csv, read as burstgpt: line 1"),
        (("--trace", "/bin/ls"), "--trace /bin/ls: it is no UTF-8 text"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(arguments: tuple[str, ...], what: str) -> None:
    done = CliRunner().invoke(main, ["simulate", *arguments])
    assert done.exit_code == 2
    assert what in done.output
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""


def test_a_full_disk_is_said_in_a_line() -> None:
    done = CliRunner().invoke(main, ["simulate", *ONE, "--csv", "/dev/full"])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True)
    assert "No space left" in done.stderr


def test_what_is_refused_leaves_no_file_and_an_earlier_one_whole(tmp_path: Path) -> None:
    new, earlier = tmp_path / "new.csv", tmp_path / "earlier.json"
    earlier.write_text("kept")
    arguments = ("--prefill", "8", "--csv", str(new), "--timeline", str(earlier))
    assert CliRunner().invoke(main, ["simulate", *ONE, *arguments]).exit_code == 2
    assert (new.exists(), earlier.read_text()) == (False, "kept")
