"""``prfaas report rebalancing``: what a gateway has seen of its traffic and its split, for a planner."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

import click

from gateway.commands.client import Api, gateway_options
from gateway.commands.inputs import Finite, Unusable, check_writable

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@click.group()
def report() -> None:
    """Reports for capacity planners."""


@report.command("rebalancing")
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "csv", "html"]),
    help="[default: json, or as the name of the file given with -o ends]",
)
@click.option("--since", help="How far back: 90s, 30m, 6h, 2d, or a UTC time such as 2026-01-31T08:00.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it to this file.")
@click.option("--tpot-goal-ms", type=Finite(0, min_open=True), help="Goal for the time per output token.")
@click.option("--ttft-floor-s", type=Finite(0, min_open=True), default=2.0, show_default=True, help="Part of the goal.")
@click.option(
    "--ttft-factor",
    type=Finite(0, min_open=True),
    default=3.0,
    show_default=True,
    help="The goal for TTFT is the floor + this many times the prompt's prefill on the quickest idle node.",
)
@gateway_options
def rebalancing(
    api: Api,
    as_json: bool,
    form: str | None,
    since: str | None,
    output: Path | None,
    tpot_goal_ms: float | None,
    ttft_floor_s: float,
    ttft_factor: float,
) -> None:
    """Traffic, stages, bottleneck, the best split and threshold, conversions, latency, egress and price."""
    named = "" if output is None else output.suffix.lstrip(".")
    chosen = "json" if as_json else form or (named if named in ("json", "csv", "html") else "json")
    query: dict[str, str | float] = {"format": chosen, "ttft_floor_s": ttft_floor_s, "ttft_factor": ttft_factor}
    if since is not None:
        query["since"] = _moment(since, time.time())
    if tpot_goal_ms is not None:
        query["tpot_goal_ms"] = tpot_goal_ms
    path = f"/v1/reports/rebalancing?{urlencode(query)}"
    if output is None:
        api.download(path, sys.stdout.buffer)
        return
    check_writable("-o", output)
    made = BytesIO()  # an earlier report stays whole until there is another
    api.download(path, made)
    try:
        output.write_bytes(made.getvalue())
    except OSError as error:
        raise click.ClickException(f"-o {output}: {error.strerror}") from error
    click.echo(f"{output}", err=True)


def _moment(since: str, now: float) -> float:
    """Unix seconds. Raises Unusable."""
    span = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", since)
    if span is not None:
        return max(0.0, now - float(span[1]) * _UNITS[span[2]])
    try:
        at = datetime.fromisoformat(since)
    except ValueError:
        raise Unusable(
            f"--since {since}: give a span such as 30m, 6h or 2d, or a time such as 2026-01-31T08:00"
        ) from None
    return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
