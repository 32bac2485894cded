"""``prfaas plan`` as a planner meets it: JSON within the derived figures, a narrow link, public models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli import main

KEYS = {
    "t",
    "N_p",
    "N_d",
    "p",
    "theta_prfaas",
    "theta_pdp",
    "theta_pdd",
    "lambda_max",
    "egress_gbps",
    "ratio_to_homogeneous",
    "ttft_mean_s",
    "ttft_p90_s",
}
OBJECTS = ("prfaas_pd", "homogeneous", "naive", "fractional_bound")

# Derived from the tables of arXiv 2604.15039 for either reading: rates in req/s, and t and N_p where searched for.
DERIVED = {
    "point": {
        "homogeneous": {"lambda_max": 2.11, "N_p": 9},
        "naive": {"lambda_max": 2.504, "N_d": 8},
        "prfaas_pd": {"lambda_max": 3.289, "t": 19_247, "N_p": 3},
        "prfaas_pd_as_published": {"lambda_max": 3.254},
        "fractional_bound": {"lambda_max": 3.435, "t": 21_363, "N_p": 3.604},
        "homogeneous_fractional": {"lambda_max": 2.164},
    },
    "mean_service": {
        "homogeneous": {"lambda_max": 2.025, "N_p": 9},
        "naive": {"lambda_max": 2.411, "N_d": 8},
        "prfaas_pd": {"lambda_max": 3.224, "t": 19_476, "N_p": 3, "ratio_to_homogeneous": 1.592},
        "prfaas_pd_as_published": {"lambda_max": 3.219, "p": 0.4957, "egress_gbps": 12.27, "ttft_mean_s": 2.168},
        "fractional_bound": {"lambda_max": 3.386, "t": 21_804, "N_p": 3.665},
        "homogeneous_fractional": {"lambda_max": 2.097},
    },
}
# As printed in the paper's table of the case study.
PUBLISHED_LAMBDA = {"prfaas_pd": 3.24, "homogeneous": 2.11, "naive": 2.45}


def prfaas(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments), prog_name="prfaas")
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return dict(json.loads(prfaas("plan", "case-study", "--json")))


@pytest.fixture(scope="module")
def narrow() -> dict[str, Any]:
    return dict(json.loads(prfaas("plan", "case-study", "--json", "--link-gbps", "5")))


@pytest.mark.parametrize("reading", DERIVED)
def test_the_json_is_within_half_a_per_cent_of_the_derived_figures(report: dict[str, Any], reading: str) -> None:
    for name, expected in DERIVED[reading].items():
        for key, value in expected.items():
            assert report[reading][name][key] == pytest.approx(value, rel=0.005), (name, key)


@pytest.mark.parametrize("reading", DERIVED)
def test_every_object_has_every_key(report: dict[str, Any], reading: str) -> None:
    for name in OBJECTS:
        assert set(report[reading][name]) >= KEYS


@pytest.mark.parametrize("reading", DERIVED)
def test_published_figures_stand_beside_ours_with_their_differences(report: dict[str, Any], reading: str) -> None:
    for name, rate in PUBLISHED_LAMBDA.items():
        ours = report[reading][name]
        assert ours["published"]["lambda_max"] == rate
        assert ours["difference"].keys() == ours["published"].keys()
        assert ours["difference"]["lambda_max"] == pytest.approx(ours["lambda_max"] / rate - 1, abs=1e-5)


def test_the_report_says_which_reading_is_the_limit(report: dict[str, Any]) -> None:
    assert report["true_limit"] == "mean_service"
    assert report["mean_service"]["prfaas_pd"]["lambda_max"] < report["point"]["prfaas_pd"]["lambda_max"]


@pytest.mark.parametrize("reading", DERIVED)
def test_over_a_narrow_link_the_threshold_rises_until_the_link_carries_what_is_left(
    report: dict[str, Any], narrow: dict[str, Any], reading: str
) -> None:
    wide, found = report[reading]["prfaas_pd"], narrow[reading]["prfaas_pd"]
    assert not wide["link_bound"]
    assert found["link_bound"]
    assert found["t"] > wide["t"]
    assert found["theta_prfaas"] == pytest.approx(5e9 / 8 / found["s_kv_long_bytes"], rel=1e-4)
    assert found["egress_gbps"] == pytest.approx(5, rel=1e-4)
    same_split = [[s["t"] for s in plan["splits"][reading] if s["N_p"] == 3] for plan in (report, narrow)]
    assert same_split[1] > same_split[0]


def test_the_table_names_the_true_limit_and_the_published_figures() -> None:
    said = prfaas("plan", "case-study")
    assert "mean_service (the true limit)" in said
    assert "The link does not bind" in said
    assert said.count("published") >= 3
    assert "3.224" in said


def test_the_differences_stand_under_their_own_columns() -> None:
    lines = prfaas("plan", "case-study").splitlines()
    header = next(line for line in lines if "Λ max" in line)
    ours, published, difference = (
        next(line for line in lines if line.startswith(s)) for s in ("PrfaaS-PD", "  published", "  difference")
    )
    for column in ("Λ max", "ratio", "Gbps", "TTFT", "P90"):
        at = header.index(column)
        a, b = (float(line[at:].split()[0]) for line in (ours, published))
        assert float(difference[at:].split("%")[0]) == pytest.approx((a / b - 1) * 100, abs=0.6), column


def test_the_table_of_a_narrow_link_says_what_bounds() -> None:
    assert "The link binds" in prfaas("plan", "case-study", "--link-gbps", "5")


@pytest.mark.parametrize("gbps", ["0", "-1", "fast"])
def test_a_link_that_carries_nothing_is_refused_by_name(gbps: str) -> None:
    done = CliRunner().invoke(main, ["plan", "case-study", "--link-gbps", gbps], prog_name="prfaas")
    assert done.exit_code == 2
    assert "--link-gbps" in done.output


def test_the_models_sizes_are_those_of_their_layers() -> None:
    models = {one["name"]: one["s_kv_bytes"] for one in json.loads(prfaas("plan", "models", "--json"))["models"]}
    state = 32 * 128 * 128 * 4 + 3 * 32 * 128 * 4 * 2
    assert models["Kimi-Linear-48B-A3B"][0] == 1024 * 7 * 576 * 2 + 20 * state
    assert models["MiMo-V2-Flash"][1] == 8192 * 9 * 4 * 320 * 2 + 127 * 39 * 8 * 320 * 2
    state = 64 * 128 * 128 * 4 + (2 * 16 * 128 + 64 * 128) * 4 * 2
    assert models["Qwen3.5-397B-A17B"][2] == 32_768 * 15 * 2 * 2 * 256 * 2 + 45 * state
    assert models["MiniMax-M2.5"][3] == 131_072 * 62 * 2 * 8 * 128 * 2
    assert models["Qwen3-235B-A22B"][3] == 131_072 * 94 * 2 * 4 * 128 * 2


def test_the_models_times_are_said_to_be_fitted_and_return_the_published_throughput() -> None:
    report = json.loads(prfaas("plan", "models", "--json"))
    assert "not measured" in report["note"]
    assert "Ring-2.5-1T" in report["left_out"]
    for one in report["models"]:
        assert one["t_prefill_fitted"]
        assert one["config_source"]
        assert one["fit"]["largest_relative_error"] < 0.06
        for size, seconds, phi in zip(one["s_kv_bytes"], one["t_prefill_s"], one["published_phi_kv_gbps"], strict=True):
            assert size * 8e-9 / seconds == pytest.approx(phi, rel=1e-4)
        assert one["t_prefill_s"] == sorted(one["t_prefill_s"])
    said = prfaas("plan", "models")
    assert "not measured" in said
    assert "Ring-2.5-1T is left out" in said
