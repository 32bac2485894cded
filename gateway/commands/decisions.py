"""``prfaas decisions``: the newest decisions, all of them as JSON lines, and deciding them again."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table, seconds
from scheduler.replay import RecordError, Replayed, replay

SHOWN = 20
"""Differences and unreadable lines that are printed; all are counted."""


@click.group()
def decisions() -> None:
    """List and export routing decisions, and decide them again."""


@decisions.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@gateway_options
def list_decisions(api: Api, as_json: bool, limit: int) -> None:
    """The newest decisions."""
    found = api.call("GET", f"/v1/decisions?limit={limit}")
    if as_json:
        print_json(found)
        return
    rows = [_row(record) for record in found["decisions"]]
    print_table(("at", "request", "route", "because", "predicted", "first token", "outcome"), rows, "no decisions")


@decisions.command("export")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file, instead of stdout.")
@gateway_options
def export(api: Api, as_json: bool, output: Path | None) -> None:
    """Write all kept decisions as JSON lines, oldest first; each has a schema number. --json changes nothing."""
    if output is None:
        api.download("/v1/decisions/export", sys.stdout.buffer)
        return
    try:
        with output.open("wb") as file:
            api.download("/v1/decisions/export", file)
    except OSError as error:
        raise click.ClickException(f"--output {output}: {error}") from error


@decisions.command("replay")
@click.argument("file", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay_command(file: BinaryIO, as_json: bool) -> None:
    """Decide every decision in FILE (as exported; - for stdin) again and compare both, byte for byte.

    Ends with 1 where one differs or FILE has none that can be decided again.
    """
    same, differing, skipped = 0, [], []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            for one in replay(line):
                if one.same:
                    same += 1
                else:
                    differing.append(_difference(number, one))
        except RecordError as error:
            skipped.append({"line": number, "why": str(error)})
    if as_json:
        print_json(
            {"same": same, "differing": len(differing), "skipped": len(skipped), "differences": differing[:SHOWN]}
        )
    else:
        for entry in skipped[:SHOWN]:
            click.echo(f"line {entry['line']}: skipped, {entry['why']}")
        for entry in differing[:SHOWN]:
            click.echo(f"line {entry['line']}: {entry['id']} ({entry['kind']}) differs from byte {entry['byte']}:")
            click.echo(f"  was  ...{entry['recorded']}\n  now  ...{entry['again']}")
        click.echo(f"{same} decisions are the same, {len(differing)} differ, {len(skipped)} lines were skipped")
    if differing or not same:
        sys.exit(1)


def _row(record: dict[str, Any]) -> tuple[Any, ...]:
    decision = record["decision"] or {}
    predicted = (decision.get("chosen") or {}).get("predicted_ttft_s")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["at"]))
    return (
        at,
        record["request_id"],
        record["route"],
        decision.get("reason"),
        seconds(predicted),
        seconds(record["ttft_s"]),
        record["outcome"],
    )


def _difference(number: int, one: Replayed) -> dict[str, Any]:
    pairs = zip(one.recorded, one.again, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.recorded), len(one.again)))
    around = slice(max(0, at - 40), at + 40)
    return {
        "line": number,
        "id": one.record_id,
        "kind": one.kind,
        "byte": at,
        "recorded": one.recorded[around].decode(errors="replace"),
        "again": one.again[around].decode(errors="replace"),
    }
