"""``prfaas plan``: what the throughput model says, of the published case study and of public models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gateway.commands.client import print_json, print_table
from gateway.commands.inputs import Finite
from gateway.commands.proposals import approve, proposals, refuse
from gateway.commands.what_if import what_if
from gateway.public_models import LEFT_OUT, MODELS, TOKENS, KvThroughput, kv_throughput
from gateway.public_models import SOURCE as MODELS_SOURCE
from scheduler.case_study import (
    BYTES_PER_S_PER_GBPS,
    LINK_GBPS,
    PUBLISHED,
    SOURCE,
    Figures,
    Outcome,
    Study,
    case_study,
)
from scheduler.profiles import kv_bytes_per_s
from scheduler.throughput import Reading

TRUE_LIMIT = Reading.MEAN_SERVICE
WHY = (
    "mean_service is the true limit: prefill time is convex in length, so a node needs E[T(L)] seconds a prompt, more "
    "than T(E[L]), and a queue that gets more than N / E[T(L)] grows without bound. point takes T at the mean length, "
    "as most published figures do."
)
NO_QUEUE = (
    "TTFT is prefill service time without any queueing, as in the paper: it says nothing about behaviour under load."
)
FITTED = (
    "S_kv is worked out from each config for a bf16 cache with fp32 recurrent states. T_prefill is not measured here: "
    "it is S_kv over the published Phi_kv, and the fit a curve through those four points."
)
GPUS = 512
GPUS_PER_INSTANCE = 8

_NAMES = {
    "prfaas_pd": "PrfaaS-PD",
    "homogeneous": "homogeneous",
    "naive": "naive",
    "fractional_bound": "fractional bound",
    "homogeneous_fractional": "homogeneous, fractional",
    "prfaas_pd_as_published": "3/5 at t = 19.4K",
}
_COLUMNS = {
    "t": ("t", ",.0f"),
    "n_prfaas": ("remote", "g"),
    "n_p": ("N_p", ".3g"),
    "n_d": ("N_d", ".3g"),
    "p": ("p", ".3f"),
    "theta_prfaas": ("Θ prfaas", ".3f"),
    "theta_pdp": ("Θ pd-p", ".3f"),
    "theta_pdd": ("Θ pd-d", ".3f"),
    "lambda_max": ("Λ max", ".3f"),
    "ratio_to_homogeneous": ("ratio", ".2f"),
    "egress_gbps": ("Gbps", ".2f"),
    "ttft_mean_s": ("TTFT", ".2f"),
    "ttft_p90_s": ("P90", ".2f"),
}
_KEYS = {"n_prfaas": "N_prfaas", "n_p": "N_p", "n_d": "N_d"}


@click.group()
def plan() -> None:
    """Work out capacities and splits from the throughput model; say what a gateway should do about its own."""


for command in (proposals, approve, refuse, what_if):
    plan.add_command(command)


@plan.command("case-study")
@click.option(
    "--link-gbps",
    type=Finite(0, min_open=True),
    default=LINK_GBPS,
    show_default=True,
    help="Egress of the prefill cluster.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def case_study_command(link_gbps: float, as_json: bool) -> None:
    """Work out the published PrfaaS case study, in both readings, beside its published figures."""
    studies = case_study(link_gbps)
    if as_json:
        print_json(_report(studies, link_gbps))
        return
    click.echo(f"PrfaaS case study ({SOURCE}); link {link_gbps:g} Gbps, published figures are for {LINK_GBPS:g} Gbps")
    for reading, study in studies.items():
        click.echo(f"\n{reading}" + (" (the true limit)" if reading is TRUE_LIMIT else ""))
        rows = [row for name, outcome in study.outcomes.items() for row in _rows(name, outcome.figures)]
        print_table(("", *(heading for heading, _ in _COLUMNS.values())), rows, "")
    click.echo("\nevery whole split at its best threshold, mean_service")
    splits = [
        (f"{s.n_p:g} : {s.n_d:g}", f"{s.demand.t:,.0f}", f"{s.lambda_max:.3f}", s.limited_by)
        for s in studies[TRUE_LIMIT].splits
    ]
    print_table(("N_p : N_d", "t", "Λ max", "full first"), splits, "")
    click.echo(f"\n{_link(studies[TRUE_LIMIT].outcomes['prfaas_pd'], link_gbps)}")
    click.echo(f"{WHY}\n{NO_QUEUE}")


@plan.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models_command(as_json: bool) -> None:
    """Show what public models' KV caches take and how fast an instance makes them."""
    found = [kv_throughput(model) for model in MODELS]
    if as_json:
        print_json(
            {
                "source": MODELS_SOURCE,
                "note": FITTED,
                "tokens": TOKENS,
                "models": [_model(one) for one in found],
                "left_out": LEFT_OUT,
            }
        )
        return
    click.echo(f"KV throughput of public models ({MODELS_SOURCE})\n")
    rows = [
        (
            one.model.name,
            f"{tokens:,}",
            f"{one.size.nbytes(float(tokens)) / 2**20:,.1f} MiB",
            phi,
            f"{seconds:.3f} s",
            f"{one.fitted.seconds(float(tokens)):.3f} s",
            f"{_fitted_gbps(one, tokens):.2f}",
        )
        for one in found
        for tokens, phi, seconds in zip(TOKENS, one.model.phi_gbps, one.seconds, strict=True)
    ]
    print_table(("model", "tokens", "S_kv", "published Gbps", "T_prefill from it", "fitted", "fitted Gbps"), rows, "")
    click.echo(f"\n{FITTED}")
    for one in found:
        click.echo(
            f"{one.model.name}: fit within {one.fit_error:.1%}; {GPUS} GPUs at 32K send {_fleet_gbps(one):,.0f} Gbps; "
            f"config: {one.model.config_source}"
        )
    for name, why in LEFT_OUT.items():
        click.echo(f"{name} is left out: {why}")


def _report(studies: dict[Reading, Study], link_gbps: float) -> dict[str, Any]:
    return {
        "source": SOURCE,
        "link_gbps": link_gbps,
        "published_link_gbps": LINK_GBPS,
        "true_limit": TRUE_LIMIT,
        "why": WHY,
        "ttft": NO_QUEUE,
        **{
            str(reading): {name: _outcome(name, outcome) for name, outcome in study.outcomes.items()}
            for reading, study in studies.items()
        },
        "splits": {
            str(reading): [
                {
                    "N_p": s.n_p,
                    "N_d": s.n_d,
                    "t": round(s.demand.t),
                    "lambda_max": _short(s.lambda_max),
                    "limited_by": s.limited_by,
                }
                for s in study.splits
            ]
            for reading, study in studies.items()
        },
    }


def _outcome(name: str, outcome: Outcome) -> dict[str, Any]:
    demand = outcome.rates.demand
    found: dict[str, Any] = {
        **_figures(outcome.figures),
        "limited_by": outcome.rates.limited_by,
        "link_bound": demand.link_bound,
        "l_long": round(demand.l_long),
        "l_short": round(demand.l_short),
        "s_kv_long_bytes": round(demand.kv_long_bytes),
        "needed_egress_gbps": _short(demand.needed_egress_bytes_per_s / BYTES_PER_S_PER_GBPS),
    }
    if name in PUBLISHED:
        published = _figures(PUBLISHED[name])
        found["published"] = {key: value for key, value in published.items() if value is not None}
        found["difference"] = {
            key: None if found[key] is None else _short(found[key] / value - 1)
            for key, value in found["published"].items()
        }
    return found


def _figures(figures: Figures) -> dict[str, Any]:
    plain = {_KEYS.get(key, key): None if value is None else _short(value) for key, value in asdict(figures).items()}
    return {**plain, "t": None if figures.t is None else round(figures.t)}


def _rows(name: str, figures: Figures) -> list[tuple[str | None, ...]]:
    """One deployment as a row, and where the paper has it, the published row and the differences."""
    ours = asdict(figures)
    rows = [(_NAMES[name], *_cells(ours))]
    if name in PUBLISHED:
        theirs = asdict(PUBLISHED[name])
        differences = [
            f"{ours[key] / theirs[key] - 1:+.1%}" if ours[key] is not None and theirs[key] is not None else None
            for key in _COLUMNS
        ]
        rows += [("  published", *_cells(theirs)), ("  difference", *differences)]
    return rows


def _cells(figures: dict[str, float | None]) -> list[str | None]:
    return [None if (value := figures[key]) is None else format(value, form) for key, (_, form) in _COLUMNS.items()]


def _link(outcome: Outcome, link_gbps: float) -> str:
    demand = outcome.rates.demand
    needed = demand.needed_egress_bytes_per_s / BYTES_PER_S_PER_GBPS
    if not demand.link_bound:
        return f"The link does not bind: its prefill nodes make {needed:.1f} Gbps of KV at most, of {link_gbps:g}."
    return (
        f"The link binds: at this threshold its prefill nodes could make {needed:.1f} Gbps of KV. Θ prfaas = B_out / "
        f"S_kv(l_long) = {link_gbps:g} Gbps / {demand.kv_long_bytes / 1e6:,.0f} MB = {demand.theta_prfaas:.3f} req/s; "
        f"the threshold keeps at home what the link cannot carry."
    )


def _model(one: KvThroughput) -> dict[str, Any]:
    return {
        "name": one.model.name,
        "config": one.model.config,
        "config_source": one.model.config_source,
        "s_kv_bytes": [round(one.size.nbytes(float(tokens))) for tokens in TOKENS],
        "published_phi_kv_gbps": one.model.phi_gbps,
        "t_prefill_s": [_short(seconds) for seconds in one.seconds],
        "t_prefill_fitted": True,
        "fit": {
            "c0_s": _short(one.fitted.c0_s),
            "c1_s": _short(one.fitted.c1_s),
            "c2_s": _short(one.fitted.c2_s),
            "largest_relative_error": _short(one.fit_error),
        },
        "fitted_phi_kv_gbps": [_short(_fitted_gbps(one, tokens)) for tokens in TOKENS],
        "egress_gbps_512_gpus_32k": _short(_fleet_gbps(one)),
    }


def _fitted_gbps(one: KvThroughput, tokens: int) -> float:
    return kv_bytes_per_s(one.size, one.fitted, tokens) / BYTES_PER_S_PER_GBPS


def _fleet_gbps(one: KvThroughput) -> float:
    """Equation 2 for a cluster of 512 GPUs that prefills 32K-token prompts, at the published Phi_kv."""
    return one.model.phi_gbps[TOKENS.index(32_768)] * GPUS / GPUS_PER_INSTANCE


def _short(value: float) -> float | int:
    """Six significant digits; a whole number as one."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded
