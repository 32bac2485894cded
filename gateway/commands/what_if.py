"""``prfaas plan what-if``: the same question to a running gateway, or about a preset without one."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, nan
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from gateway.commands.client import Api, gateway_options, print_json, print_table
from gateway.commands.inputs import Unusable
from gateway.report import words
from scheduler.values import PolicyValues
from scheduler.what_if.answer import answer
from scheduler.what_if.basis import case_study
from scheduler.what_if.question import EVERY, PRESETS, Question


@click.command("what-if")
@click.option("--preset", type=click.Choice(PRESETS), help="Ask about this instead of a running gateway.")
@click.option("--add-nodes", multiple=True, metavar="[CLUSTER=]N", help="More nodes, or fewer; local ones by default.")
@click.option("--link-gbps", multiple=True, metavar="[CLUSTER=]GBPS", help="Egress of remote clusters.")
@click.option("--price", multiple=True, metavar="[CLUSTER=]PER_GB", help="Price of a GB that leaves a remote cluster.")
@click.option(
    "--prefill-price", multiple=True, metavar="[CLUSTER=]PER_S", help="Price of a second of a node's prefill."
)
@click.option("--traffic-scale", type=float, default=1.0, show_default=True, help="Times as many requests.")
@click.option("--input-scale", type=float, default=1.0, show_default=True, help="Times as long prompts.")
@click.option("--output-scale", type=float, default=1.0, show_default=True, help="Times as long answers.")
@click.option("--rate", type=float, help="Requests per second, instead of those observed.")
@click.option("--prefill", type=int, help="Local nodes that prefill, instead of the best number.")
@click.option("--threshold", type=int, help="Uncached tokens, instead of the best threshold.")
@click.option("--requests", type=int, default=20_000, show_default=True, help="Requests to simulate in each case.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the requests drawn.")
@gateway_options
def what_if(api: Api, as_json: bool, preset: str | None, **given: Any) -> None:
    """Say what would be if the fleet, its links, its prices or its traffic were different: by model and simulation."""
    body = _body(preset, given, "local" if preset else None, api)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=1.0)

        def heard(share: float) -> None:
            progress.update(bar, completed=share)

        found = api.answer_lines("/v1/plans/what-if", body, heard) if preset is None else _here(body, heard)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _body(preset: str | None, given: dict[str, Any], local: str | None, api: Api) -> dict[str, Any]:
    """The question as JSON; what was left out is left out."""
    prices = {
        name: {"egress_per_gb": value} for name, value in _by_cluster("--price", given.pop("price"), EVERY).items()
    }
    for name, value in _by_cluster("--prefill-price", given.pop("prefill_price"), EVERY).items():
        prices.setdefault(name, {})["prefill_per_s"] = value
    added = given.pop("add_nodes")
    if local is None and any("=" not in one for one in added):
        local = next(one["name"] for one in api.call("GET", "/v1/clusters")["clusters"] if one["local"])
    nodes = {name: _whole("--add-nodes", n) for name, n in _by_cluster("--add-nodes", added, local or "").items()}
    links = _by_cluster("--link-gbps", given.pop("link_gbps"), EVERY)
    body: dict[str, Any] = {"add_nodes": nodes, "link_gbps": links, "prices": prices}
    body |= {name: value for name, value in given.items() if value is not None}
    return body if preset is None else body | {"preset": preset}


def _by_cluster(option: str, entries: tuple[str, ...], default: str) -> dict[str, float]:
    found = {}
    for entry in entries:
        name, given, value = entry.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = nan
        if not isfinite(number):
            raise Unusable(f"{option} {entry}: give a number, or CLUSTER=NUMBER")
        found[name if given else default] = number
    return found


def _whole(option: str, value: float) -> int:
    if value != int(value):
        raise Unusable(f"{option} {value:g}: give a whole number")
    return int(value)


def _here(body: dict[str, Any], heard: Callable[[float], None]) -> dict[str, Any]:
    try:
        question = msgspec.convert(body, Question)
        found = answer(case_study(), question, PolicyValues(), heard)
    except ValueError as error:
        raise Unusable(str(error)) from error
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return plain


def _show(found: dict[str, Any]) -> None:
    cases = found["cases"]
    rows: list[tuple[str, Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], str]]] = [
        ("split", lambda m, p, s: words.split(p["prefill"], p["decode"])),
        ("threshold, tokens", lambda m, p, s: words.tokens(p["threshold"])),
        ("offered, req/s", lambda m, p, s: words.number(m["rate"])),
        ("model: Λ max, req/s", lambda m, p, s: words.number(p["lambda_max"])),
        ("model: the same, point reading", lambda m, p, s: words.number(p["lambda_point"])),
        ("model: load", lambda m, p, s: words.share(m["load"])),
        ("model: full first", lambda m, p, s: str(p["limited_by"])),
        ("model: egress, Gbps", lambda m, p, s: words.number(p["egress_gbps"])),
        ("model: cost an hour", lambda m, p, s: words.number(m["cost_per_hour"]) if m["priced"] else "no price"),
        ("simulated: served, req/s", lambda m, p, s: words.number(s["throughput_req_s"])),
        ("simulated: steady", lambda m, p, s: "yes" if s["steady"] else "no, its queue grows"),
        ("simulated: TTFT P50", lambda m, p, s: _waited(s["ttft_p50_s"])),
        ("simulated: TTFT P90", lambda m, p, s: _waited(s["ttft_p90_s"])),
        ("simulated: TTFT P99", lambda m, p, s: _waited(s["ttft_p99_s"])),
        ("simulated: SLO attained", lambda m, p, s: words.share(s["slo_attainment"])),
        ("simulated: egress, Gbps", lambda m, p, s: words.number(s["egress_gbps"])),
        ("simulated: offloaded", lambda m, p, s: words.share(s["offloaded_share"])),
    ]
    print_table(
        ("", *(case["name"] for case in cases)),
        [
            (name, *(cell(case["model"], case["model"]["point"], case["simulation"]) for case in cases))
            for name, cell in rows
        ],
        "",
    )
    click.echo(f"\nrebalanced, the model carries {words.times(found['gain'])} today's")
    for note in found["notes"]:
        click.echo(note)


def _waited(value: float | None) -> str:
    """JSON has no infinity: what is missing never came."""
    return "never" if value is None else words.seconds(value)
