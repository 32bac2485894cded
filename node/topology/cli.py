"""`prfaas topology`: what this machine has, the projection, and placements of mixture-of-experts traffic."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from node.config import ConfigError, place
from node.topology.architectures import architectures
from node.topology.discover import discover
from node.topology.machine import ThisMachine
from node.topology.render import table, tree
from scheduler.placement.evaluate import Evaluation, evaluate
from scheduler.placement.fleet import Fleet
from scheduler.placement.policies import SINGLE, Placement, Policy
from scheduler.placement.trace import Arrivals, Request, Skew, made_up, read
from scheduler.topology.pipeline import even
from scheduler.topology.projection import (
    GPUS,
    PFLOPS,
    PUBLISHED_HIDDEN,
    PUBLISHED_MS,
    PUBLISHED_SPEEDUP,
    SOURCE,
    TOKENS,
    UTILISATION,
    Figures,
    limits,
    project,
    share_for,
)

MODELLED = "All of it is modelled: it follows from layouts and rates, and nothing was measured."
ASSUMPTIONS = (
    "rates are the paper's; its NVLink 900 GB/s is the sum of both directions, the others count one",
    "a transfer has its way for itself and moves raw bytes; beginning one takes no time",
    f"a layer's computing takes 2 FLOP a parameter and token on {GPUS} x H100 at {UTILISATION:.0%} of "
    f"{PFLOPS / 1e12:.0f} TFLOP/s, all layers alike; attention over positions is left out, which makes it too short",
    "layers are computed and sent in order, each as soon as it is there",
)


@click.group(invoke_without_command=True)
@click.option("--place", "said", metavar="region=R,zone=Z,rack=K,host=H", help="Where this machine stands.")
@click.option(
    "--pod-labels",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of the Kubernetes downward API with topology labels.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def topology(context: click.Context, said: str | None, pod_labels: Path | None, as_json: bool) -> None:
    """Show the GPUs, links, RDMA ports, NUMA nodes and interfaces of this machine."""
    if context.invoked_subcommand is not None:
        return
    try:
        report = discover(ThisMachine(), place(said, pod_labels))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        _print_json(msgspec.to_builtins(report))
        return
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table(report))
    console.print()
    console.print(tree(report))


@topology.command("project")
@click.option("--tokens", type=click.IntRange(1, 1 << 24), default=TOKENS, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def project_command(tokens: int, as_json: bool) -> None:
    """Reproduce the published comparison of ways: times, shares hidden, speed-ups over uniform RDMA. Modelled."""
    figures = [project(one, tokens) for one in architectures()]
    if as_json:
        _print_json(_projection(figures))
        return
    click.echo(f"Ways of a KV transfer within a cluster ({SOURCE}). {MODELLED}\n")
    shown = Table(box=None, pad_edge=False)
    for column in ("architecture", "KV", "way", "GB/s", "transfer", "published", "over RDMA", "hidden"):
        shown.add_column(column, justify="left" if column in ("architecture", "way") else "right")
    for one in figures:
        for name, way in one.ways.items():
            published = PUBLISHED_MS.get(name) if one.architecture is figures[0].architecture else None
            shown.add_row(
                f"{one.architecture.name}, {one.architecture.kind}",
                f"{one.nbytes / 1e9:.3f} GB",
                name,
                f"{way.bytes_per_s / 1e9:g}",
                f"{way.transfer_s * 1e3:.3g} ms",
                f"{published:g} ms" if published and tokens == TOKENS else "-",
                f"{way.speedup:.2f} x",
                f"{way.pipeline.hidden:.1%}",
            )
    Console(width=None if Console().is_terminal else 160).print(shown)
    click.echo(f"\n{_hidden(figures[0])}")
    low, high = PUBLISHED_SPEEDUP
    click.echo(
        f"Published are {low:g} to {high:g} x over uniform RDMA; {low:g} x of the mean needs {share_for(low):.0%} of "
        f"all transfers inside one NVLink domain.\n\n"
        f"{high:g} x is 900 / 50, for both ends in one NVLink domain. Elsewhere:"
    )
    for limit in limits(figures):
        click.echo(f"  {limit.speedup:6.2f} x  {limit.case}: {limit.why}")
    click.echo("\nAssumed:\n" + "\n".join(f"  - {text}" for text in ASSUMPTIONS))


@topology.command("placement")
@click.option("--trace", type=click.File("rb"), help="Requests as JSON lines, in place of made-up ones.")
@click.option("--domains", type=click.IntRange(1, 64), default=4, show_default=True, help="NVLink domains.")
@click.option("--gpus", type=click.IntRange(1, 72), default=4, show_default=True, help="GPUs in each.")
@click.option("--experts", type=click.IntRange(1, 1024), default=64, show_default=True, help="Dealt to GPUs in turn.")
@click.option("--inside-gbps", type=click.FloatRange(0, min_open=True), default=3600.0, show_default=True)
@click.option("--outside-gbps", type=click.FloatRange(0, min_open=True), default=400.0, show_default=True)
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=100.0, show_default=True, help="Requests/s.")
@click.option("--count", type=click.IntRange(1, 100_000), default=300, show_default=True, help="Requests of each kind.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--decisions", is_flag=True, help="With --json: every decision of auto, and what the others would cost.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def placement_command(
    trace: Any,
    domains: int,
    gpus: int,
    experts: int,
    inside_gbps: float,
    outside_gbps: float,
    rate: float,
    count: int,
    seed: int,
    decisions: bool,
    as_json: bool,
) -> None:
    """Compare where requests to a mixture of experts are decoded: at the cache, at the experts, by load. Modelled."""
    if decisions and not as_json:
        raise click.UsageError("--decisions is for --json; give both")
    everywhere = range(domains * gpus)
    fleet = Fleet(
        tuple(gpu // gpus for gpu in everywhere),
        tuple(expert % len(everywhere) for expert in range(experts)),
        inside_gbps * 1e9 / 8,
        outside_gbps * 1e9 / 8,
    )
    traces: dict[str, list[Request]]
    if trace is not None:
        try:
            traces = {Path(trace.name).name: read(trace, fleet)}
        except ValueError as error:
            raise click.UsageError(f"--trace: {error}") from error
    else:
        # the generator draws made-up traffic, nothing that must be hard to guess
        traces = {
            kind.value: made_up(kind, fleet, Arrivals(rate, count), random.Random(seed))  # noqa: S311
            for kind in Skew
        }
    found = {name: [evaluate(fleet, requests, policy) for policy in Policy] for name, requests in traces.items()}
    if as_json:
        _print_json({"modelled": True, "traces": {n: _compared(each, decisions) for n, each in found.items()}})
        return
    click.echo("Mean cost of a request = KV transfer + expert exchange + queue, modelled\n")
    shown = Table("trace", "policy", "cost", "KV", "exchange", "queue", "auto decided by", box=None, pad_edge=False)
    for name, each in found.items():
        for one in each:
            by = ", ".join(f"{thought} {n}" for thought, n in one.by.items()) if one.policy is Policy.AUTO else ""
            parts = (one.mean_s, one.kv_s, one.exchange_s, one.queue_s)
            shown.add_row(name, one.policy.value, *(f"{part * 1e3:.2f} ms" for part in parts), by)
    Console(width=None if Console().is_terminal else 160).print(shown)


def _hidden(one: Figures) -> str:
    """What the published shares would need."""
    layers = len(one.architecture.layout.groups[0].layers)
    whole = even(layers, one.compute_s, one.compute_s)
    slow, fast = (one.nbytes * share / whole / one.compute_s / 1e9 for share in (0.6, 0.85))
    return (
        f"Published shares hidden: {PUBLISHED_HIDDEN}. With these assumptions a way hides at most 1 - 1/layers, and "
        f"60 to 85 % of {one.architecture.name} only at {slow:.1f} to {fast:.1f} GB/s."
    )


def _projection(figures: list[Figures]) -> dict[str, Any]:
    return {
        "source": SOURCE,
        "modelled": True,
        "assumptions": ASSUMPTIONS,
        "architectures": [
            {
                "name": one.architecture.name,
                "kind": one.architecture.kind,
                "layout_source": one.architecture.source,
                "tokens": one.tokens,
                "kv_bytes": one.nbytes,
                "compute_s": one.compute_s,
                "ways": {
                    name: {
                        "bytes_per_s": way.bytes_per_s,
                        "transfer_s": way.transfer_s,
                        "exposed_s": way.pipeline.exposed_s,
                        "hidden": way.pipeline.hidden,
                        "speedup_over_rdma": way.speedup,
                    }
                    for name, way in one.ways.items()
                },
            }
            for one in figures
        ],
        "published": {
            "transfer_ms": dict(PUBLISHED_MS),
            "hidden": PUBLISHED_HIDDEN,
            "speedup": PUBLISHED_SPEEDUP,
            "share_inside_for_least_speedup": share_for(PUBLISHED_SPEEDUP[0]),
        },
        "where_18x_does_not_hold": [
            {"case": one.case, "speedup": one.speedup, "why": one.why} for one in limits(figures)
        ],
    }


def _compared(each: list[Evaluation], decisions: bool) -> dict[str, Any]:
    by_policy = {one.policy: one for one in each}
    best = min(SINGLE, key=lambda policy: by_policy[policy].mean_s)
    return {
        "policies": {
            one.policy.value: {
                "mean_s": one.mean_s,
                "kv_s": one.kv_s,
                "exchange_s": one.exchange_s,
                "queue_s": one.queue_s,
                "decided_by": {thought.value: count for thought, count in one.by.items()},
            }
            for one in each
        },
        "best_single": best.value,
        "auto_over_best_single": by_policy[Policy.AUTO].mean_s / by_policy[best].mean_s,
        **({"decisions": [_decided(one) for one in by_policy[Policy.AUTO].decisions]} if decisions else {}),
    }


def _decided(one: Placement) -> dict[str, Any]:
    return {
        "gpu": one.chosen.gpu,
        "by": one.by.value,
        "costs": {
            policy.value: {"gpu": cost.gpu, "kv_s": cost.kv_s, "exchange_s": cost.exchange_s, "queue_s": cost.queue_s}
            for policy, cost in one.proposals.items()
        },
    }


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
