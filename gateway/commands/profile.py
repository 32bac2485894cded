"""``prfaas profile``: measure a running stack, or read it off its decision log, for the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.commands.client import Api, gateway_options, print_json, print_table
from gateway.commands.inputs import Finite, Unusable, check_writable
from gateway.measuring import Plan, Prober, Probes
from gateway.observations import DEFAULT_BATCH, LogUnreadable, Stack, profile, records_in
from kvcache.blocks import BLOCK_TOKENS
from scheduler.measured import MAX_BATCH, Measured, Site, Source

LEAST_PROMPT = 64
SPREAD = 4
DEFAULT_LONGEST = 4096
STREAMS = (1, 1, 1, 2, 2, 4, 8)
TOKENS = 24


@click.command("profile")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the profile here.")
@click.option(
    "--from-log",
    "log",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Send nothing: fit these decision records, one JSON object a line or an answer of /v1/decisions.",
)
@click.option(
    "--longest",
    type=click.IntRange(LEAST_PROMPT * SPREAD),
    help=f"Prompt tokens of the longest prefill.  [default: {DEFAULT_LONGEST}, or what the context holds]",
)
@click.option("--lengths", type=click.IntRange(3, 24), default=6, show_default=True, help="How many lengths.")
@click.option(
    "--repeats", type=click.IntRange(1, 20), default=3, show_default=True, help="Of each, while time is left."
)
@click.option("--within", type=Finite(5, 3600), default=120.0, show_default=True, help="Seconds that it may take.")
@click.option(
    "--batch",
    type=click.IntRange(1, MAX_BATCH),
    help=f"Answers that a decode node speaks at once.  [default: what the nodes say, {DEFAULT_BATCH} from a log]",
)
@gateway_options
def profile_command(
    api: Api,
    as_json: bool,
    out: Path | None,
    log: Path | None,
    longest: int | None,
    lengths: int,
    repeats: int,
    within: float,
    batch: int | None,
) -> None:
    """Measure a running stack: prefill over length, decode steps over streams, transfers and what else there is.

    Sends prompts of random tokens by every way, one at a time, then answers several at once, and fits their decision
    records. Other traffic meanwhile spoils the figures, and these requests keep blocks in the nodes' prefix caches. It
    takes an admin's or a planner's key. What it writes, prfaas simulate --profile takes.
    """
    check_writable("--out", out)
    try:
        if log is not None:
            records = records_in(log.read_text())
            stack = Stack("", BLOCK_TOKENS, batch or DEFAULT_BATCH)
            measured, probes = profile(records, stack, Source.LOG), Probes()
        else:
            measured, probes = _probed(api, longest, lengths, repeats, within, batch)
    except (ValueError, LogUnreadable) as error:
        raise (Unusable(f"--from-log {log}: {error}") if log else click.ClickException(str(error))) from error
    except OSError as error:
        raise Unusable(f"--from-log {log}: {error.strerror}") from error
    if out is not None:
        try:
            out.write_bytes(measured.encoded())
        except OSError as error:
            raise click.ClickException(f"--out {out}: {error.strerror}") from error
    if as_json:
        print_json(measured.plain())
    else:
        _show(measured, probes, out)


def _probed(
    api: Api, longest: int | None, lengths: int, repeats: int, within: float, batch: int | None
) -> tuple[Measured, Probes]:
    """Send the probes of a plan that suits this stack. Raises ClickException, and ValueError as ``profile`` does."""
    status = api.call("GET", "/v1/status")
    if not status["ready"]:
        raise click.ClickException(f"the gateway is not ready: {status['reason']}")
    decoders = [node for node in status["nodes"] if node["role"] == "decode"]
    batch = batch or min((node["max_running"] for node in decoders), default=0) or DEFAULT_BATCH
    room = status["model"]["max_model_len"] - TOKENS - 1
    if longest is not None and longest > room:
        raise click.ClickException(f"--longest: {longest} tokens and an answer do not fit the context; at most {room}")
    longest = longest or min(DEFAULT_LONGEST, room)
    if longest < LEAST_PROMPT * SPREAD:
        raise click.ClickException(f"the context holds prompts of {room} tokens; a curve takes {LEAST_PROMPT * SPREAD}")
    plan = Plan(
        model=status["model"]["id"],
        vocabulary=status["model"]["vocab_size"],
        ways=("local", *_remotes(status)),
        lengths=_geometric(LEAST_PROMPT, longest, lengths),
        repeats=repeats,
        streams=tuple(n for n in STREAMS if n <= batch),
        tokens=TOKENS,
        within_s=within,
    )
    probes = _watched(api, plan)
    stack = Stack(plan.model, BLOCK_TOKENS, batch)
    return profile(probes.records, stack, Source.PROBES, probes.extra_s), probes


def _remotes(status: dict[str, Any]) -> list[str]:
    return [
        cluster["name"]
        for cluster in status["clusters"]
        if not cluster["local"] and cluster["state"] == "active" and cluster["accepting"]
    ]


def _geometric(least: int, most: int, count: int) -> tuple[int, ...]:
    """Lengths in equal ratios; each has one token more than is prefilled."""
    return tuple(round(least * (most / least) ** (n / (count - 1))) + 1 for n in range(count))


def _watched(api: Api, plan: Plan) -> Probes:
    """Measure, and show how far it has come."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return Prober(api, plan, lambda what, _: console.print(what, highlight=False)).measure()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        return Prober(api, plan, lambda what, share: progress.update(task, description=what, completed=share)).measure()


def _show(measured: Measured, probes: Probes, out: Path | None) -> None:
    rows = [_row(site, measured.chunk_tokens) for site in (measured.home, *measured.clusters)]
    columns = ("prefill at", "nodes", "a prompt", "a chunk", "off by", "handling", "link", "codec", "ratio", "prefills")
    print_table(columns, rows, "")
    click.echo()
    steps = [(f"{streams:.1f}", f"{seconds * 1e3:.1f} ms") for streams, seconds in measured.steps_seen]
    print_table(("streams", "a decode step"), steps, "")
    for what in probes.left_out:
        click.echo(f"left out for want of time (--within): {what}")
    if out is None:
        click.echo("nothing was written; --out FILE keeps the profile for prfaas simulate --profile")


def _row(site: Site, chunk_tokens: int) -> tuple[Any, ...]:
    curve, handling = site.prefill, site.handling
    return (
        site.name,
        site.nodes or "in place",
        f"{curve.fixed_s * 1e3:.1f} ms +",
        f"{(curve.seconds(0, chunk_tokens) - curve.fixed_s) * 1e3:.1f} ms / {chunk_tokens}",
        f"{site.error:.1%}",
        f"{handling.fixed_s * 1e3:.1f} ms + {handling.token_s * 1e6:.1f} us a token",
        f"{site.bytes_per_s * 8 / 1e9:.3g} Gbit/s, {site.rtt_s * 1e3:.1f} ms",
        site.codec or None,
        f"{site.wire_ratio:.2f}",
        site.observations,
    )
