"""``python -m tests.faults``: every fault of the matrix under load, one after the other on one stack of real processes.

Needs root (a file system of its own for the gateway's state) and, for the clock, Debian's package libfaketime. Exits 1
where a request ended in neither an answer nor a clear error, or where something is still held afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import click

from tests.faults.matrix.faults import FAULTS
from tests.faults.matrix.run import Report, forgotten_tickets, strike, warm_up
from tests.faults.matrix.scene import FAKETIME, scene


@click.command()
@click.option("--only", multiple=True, type=click.Choice([fault.name for fault in FAULTS]), help="These faults alone.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep the processes' logs there.")
def main(only: tuple[str, ...], json_file: Path | None, logs: Path | None) -> None:
    """Run the matrix."""
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    reports, left = [], False
    with tempfile.TemporaryDirectory() as folder:
        for clock_moves in (False, True):
            faults = [fault for fault in chosen if fault.moves_clock is clock_moves]
            if not faults or (clock_moves and not FAKETIME.exists()):
                continue
            with scene(Path(folder) / str(clock_moves), logs, clock_moves) as one:
                warm_up(one)
                for fault in faults:
                    if fault.possible(one):
                        reports.append(strike(one, fault))
                        click.echo(_line(reports[-1]))
                left = not forgotten_tickets(one) or left
    click.echo("tickets: " + ("some are remembered after their deadlines" if left else "all forgotten"))
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    if left or not all(report.passed for report in reports):
        raise SystemExit(1)


def _line(report: Report) -> str:
    counts = ", ".join(f"{count} {what}" for what, count in sorted(report.counts.items(), key=lambda one: -one[1]))
    verdict = "ok" if report.passed else "FAILED"
    lines = [f"{report.fault:<18} {verdict:<6} slowest {report.slowest_s:5.1f} s   {counts}; {report.remote} from afar"]
    lines += [f"    wrong: {what}" for what in report.wrong[:10]]
    lines += [f"    leaked: {name}: {what}" for name, what in report.leaks.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
