"""``prfaas simulate``: a fleet under traffic, request by request, with the policy that the gateway runs."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.commands.client import print_json, print_table
from gateway.commands.inputs import Finite, Unusable, check_writable
from gateway.commands.simulate_source import Source, check_together, source_of
from scheduler.case_study import BYTES_PER_S_PER_GBPS, LINK_GBPS
from scheduler.measured import Measured
from scheduler.simulator.figures import LEAST_REQUESTS, LEAST_STRATIFIED, Figures, figures
from scheduler.simulator.fleet import Fleet, LinkChange
from scheduler.simulator.from_profile import fleet_of, goals_of, values_of
from scheduler.simulator.orders import Order, Ordering
from scheduler.simulator.prefixes import StoreSpec
from scheduler.simulator.presets import GOALS, homogeneous, hybrid
from scheduler.simulator.records import Spans
from scheduler.simulator.requests_table import COLUMNS, rows
from scheduler.simulator.run import Run, simulate
from scheduler.simulator.study import Choice, Name, Plan, plan, with_store
from scheduler.simulator.timeline import timeline
from scheduler.simulator.traces.formats import FORMATS
from scheduler.simulator.traffic import Traffic
from scheduler.values import PolicyValues

MEASURED_POLICIES = (Name.PRFAAS, Name.STATIC, Name.LOCAL)
"""What a measured fleet can be run by: nobody knows what another one would do."""
FILE = click.Path(dir_okay=False, path_type=Path)
MOST_RATE = 1e6
SOON_S = 2.0
SUSTAINED_SHARE = 0.8
NOTE = (
    "sustained: steady in at least 4 of 5 seeds; null for fewer than "
    f"{LEAST_REQUESTS:,} independent or {LEAST_STRATIFIED:,} stratified requests, which decide nothing"
)


@click.command("simulate")
@click.option("--preset", type=click.Choice(["case-study"]), default="case-study", show_default=True)
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Simulate the stack that prfaas profile measured, instead of a preset.",
)
@click.option("--policy", type=click.Choice([n.value for n in Name]), default=Name.PRFAAS.value, show_default=True)
@click.option("--rate", type=Finite(0, MOST_RATE, min_open=True), help="Requests per second; a trace keeps its own.")
@click.option("--requests", type=click.IntRange(1, 10_000_000), default=50_000, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Run so many, from --seed on.")
@click.option("--arrivals", type=click.Choice(["poisson", "bursty"]), default="poisson", show_default=True)
@click.option("--cv", type=Finite(0.1, 20), default=4.0, show_default=True, help="Of bursty gaps.")
@click.option("--lengths", type=click.Choice(["independent", "stratified"]), default="independent", show_default=True)
@click.option("--trace", type=click.File("r", encoding="utf-8-sig"), help="Replay the requests of a file.")
@click.option("--format", "trace_format", type=click.Choice(list(FORMATS)), default="mooncake", show_default=True)
@click.option("--speed", type=Finite(0, MOST_RATE, min_open=True), default=1.0, show_default=True, help="Of the trace.")
@click.option("--spread-s", type=Finite(0), default=0.0, help="Spread a trace's ticks of so many seconds.")
@click.option("--store", type=click.Choice(["shared", "nodes", "none"]), default="shared", show_default=True)
@click.option("--store-gb", type=Finite(0, min_open=True), help="Room for prefixes, a store; else endless.")
@click.option("--order", type=click.Choice([o.value for o in Order]), default=Order.FCFS.value, show_default=True)
@click.option("--slack", type=Finite(0), default=12.0, show_default=True, help="Of the aged order.")
@click.option("--roles", type=click.Choice(["integer", "fractional"]), default="integer", show_default=True)
@click.option("--conversion-s", type=Finite(0), default=30.0, show_default=True)
@click.option("--tpot-budget", type=Finite(0, 10), default=0.0, help="Share of a step for mixed prefill.")
@click.option("--prefill", type=click.IntRange(0), help="Local prefill machines, instead of the best.")
@click.option("--threshold", type=click.IntRange(0), help="Tokens, instead of the best.")
@click.option("--link-gbps", type=Finite(0, min_open=True), default=LINK_GBPS, show_default=True)
@click.option(
    "--link-change", "link_changes", multiple=True, help="SECONDS=GBPS: what the remote links carry from then."
)
@click.option("--late-fallback", is_flag=True, help="Try a late remote way again at home, as the gateway does.")
@click.option("--csv", "csv_file", type=FILE, help="Write every request of the first seed.")
@click.option("--timeline", "timeline_file", type=FILE, help="Write the first seed for a trace viewer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate_command(
    as_json: bool, csv_file: Path | None, timeline_file: Path | None, seed: int, seeds: int, **given: Any
) -> None:
    """Simulate a fleet under traffic: what it sustains, and how long requests wait."""
    check_together(given)
    check_writable("--csv", csv_file)
    check_writable("--timeline", timeline_file)
    try:
        source = source_of(given)
        made = _with_changes(_plan(given, source), given["link_changes"])
        runs = []
        for number in range(seed, seed + seeds):
            spans = Spans() if timeline_file is not None and number == seed else None
            requests = source.draw(number)
            with _heard(f"seed {number}", len(requests)) as heard:
                run = simulate(made.fleet, made.settings, made.policy, requests, made.controller, spans, heard)
            runs.append(figures(run, made.goals))
            if number == seed:
                _write(run, spans, csv_file, timeline_file)
    except ValueError as error:
        raise Unusable(str(error)) from error
    report = _report(given, made, source, runs, seed)
    if as_json:
        print_json(report)
        return
    print_table(("", ""), [(key, _cell(value)) for key, value in report.items() if key != "each_seed"], "")


def _plan(given: dict[str, Any], source: Source) -> Plan:
    choice = Choice(
        Name(given["policy"]),
        given["prefill"],
        given["threshold"],
        Ordering(Order(given["order"]), given["slack"]),
        given["roles"] == "fractional",
        given["conversion_s"],
        given["tpot_budget"],
        given["late_fallback"],
    )
    if given["profile"] is not None:
        if choice.name not in MEASURED_POLICIES or source.trace is None:
            names = ", ".join(MEASURED_POLICIES)
            raise click.UsageError(f"--profile goes with a --trace and the policies {names}")
        measured = _measured(given["profile"])
        fleet = fleet_of(measured)
        made = plan(choice, fleet, fleet, source.lengths, source.output_tokens, goals_of(measured), values_of(measured))
        return with_store(made, choice.name, _store(given, fleet, source.trace))
    values = PolicyValues(remote_codec="raw")
    remote, alone = hybrid(0, given["link_gbps"]), homogeneous(0)
    made = plan(choice, remote, alone, source.lengths, source.output_tokens, GOALS, values)
    return with_store(made, choice.name, _store(given, remote, source.trace))


def _measured(file: Path) -> Measured:
    try:
        return Measured.of(file.read_bytes())
    except OSError as error:
        raise Unusable(f"--profile {file}: {error.strerror}") from error
    except ValueError as error:
        raise Unusable(f"--profile {file}: {error}; prfaas profile --out writes one") from error


def _with_changes(made: Plan, changes: tuple[str, ...]) -> Plan:
    """Links that change in mid-run. Raises ValueError for what does not read so."""
    found = []
    for change in changes:
        at, _, gbps = change.partition("=")
        try:
            at_s, rate = float(at), float(gbps) * BYTES_PER_S_PER_GBPS
        except ValueError:
            raise ValueError(f"--link-change {change}: give SECONDS=GBPS, such as 600=0.05") from None
        if not (0 <= at_s < inf and 0 <= rate < inf):
            raise ValueError(f"--link-change {change}: neither may be negative or without bound")
        found += [LinkChange(at_s, cluster.name, rate) for cluster in made.fleet.clusters]
    return replace(made, settings=replace(made.settings, links=tuple(found)))


def _store(given: dict[str, Any], fleet: Fleet, trace: Traffic | None) -> StoreSpec | None:
    if trace is None or not trace.blocks or given["store"] == "none":
        return None
    room = given["store_gb"]
    return StoreSpec(
        trace.block_tokens,
        trace.block_tokens * fleet.sizes.per_token,
        fleet.sizes.state + sum(held * nbytes for held, nbytes in fleet.sizes.windows) if room else 0,
        capacity_bytes=room * 1e9 if room else float("inf"),
        shared=given["store"] == "shared",
    )


def _report(given: dict[str, Any], made: Plan, source: Source, runs: list[Figures], seed: int) -> dict[str, Any]:
    steady = sum(run.steady for run in runs)
    plain = [{key: _short(value) for key, value in asdict(run).items()} for run in runs]
    means = {key: _mean([row[key] for row in plain]) for key in plain[0] if key != "steady"}
    return {
        "policy": given["policy"],
        "order": given["order"],
        "prefill_machines": made.fleet.local[0].prefill,
        "threshold_tokens": made.settings.threshold_tokens,
        "seeds": len(runs),
        "steady_seeds": steady,
        "sustained": steady >= SUSTAINED_SHARE * len(runs) if source.enough else None,
        **means,
        "note": NOTE,
        "each_seed": [{"seed": seed + index} | row for index, row in enumerate(plain)],
    }


def _write(run: Run, spans: Spans | None, csv_file: Path | None, timeline_file: Path | None) -> None:
    try:
        if csv_file is not None:
            with csv_file.open("w", newline="", encoding="utf-8") as table:
                writer = csv.writer(table)
                writer.writerow(COLUMNS)
                writer.writerows(rows(run))
        if timeline_file is not None and spans is not None:
            with timeline_file.open("w", encoding="utf-8") as viewer:
                json.dump(timeline(run, spans), viewer)
    except OSError as error:
        raise click.ClickException(f"--csv or --timeline: {error.strerror}") from error


@contextmanager
def _heard(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, for what takes more than two seconds."""
    began = time.monotonic()
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=total)
    shown = False

    def heard(come: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - began > SOON_S:
            shown = True
            bar.start()
        if shown:
            bar.update(task, completed=come)

    try:
        yield heard
    finally:
        if shown:
            bar.stop()


def _mean(values: list[Any]) -> Any:
    if any(value is None for value in values):
        return None
    return _short(fmean(values))


def _short(value: Any) -> Any:
    """Six significant digits; None for what is infinite, which JSON has no word for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if not isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, (int, float)) else str(value)
