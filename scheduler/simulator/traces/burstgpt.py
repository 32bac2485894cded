"""BurstGPT: CSV of Timestamp in s, Model, Request tokens, Response tokens, Total tokens, Log Type.

Requests without a response failed on the service that was logged and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.simulator.traces.reading import Rows, count, csv_rows, seconds
from scheduler.simulator.traffic import Traffic

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def burstgpt(lines: Iterable[str]) -> Traffic:
    """Read one. Raises TraceError."""
    rows = Rows()
    for number, row in csv_rows(lines, COLUMNS):
        output = count(row, "Response tokens", number)
        if output:
            rows.add(seconds(row, "Timestamp", number), count(row, "Request tokens", number), output)
    return rows.traffic()
