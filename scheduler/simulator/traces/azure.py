"""Azure's LLM inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens. They name no prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.simulator.traces.reading import Rows, count, csv_rows, moment
from scheduler.simulator.traffic import Traffic

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def azure(lines: Iterable[str]) -> Traffic:
    """Read one. Raises TraceError."""
    rows = Rows()
    for number, row in csv_rows(lines, COLUMNS):
        at_s = moment(row["TIMESTAMP"], number)
        rows.add(at_s, count(row, "ContextTokens", number), count(row, "GeneratedTokens", number))
    return rows.traffic()
