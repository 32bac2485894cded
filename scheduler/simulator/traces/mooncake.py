"""Mooncake's traces (FAST '25): JSONL of timestamp in ms, input_length, output_length, hash_ids of 512-token blocks."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.simulator.traces.reading import Rows, count, json_rows, names, seconds
from scheduler.simulator.traffic import Traffic

BLOCK_TOKENS = 512
TICK_S = 3.0
"""Its timestamps are multiples of this."""


def mooncake(lines: Iterable[str]) -> Traffic:
    """Read one. Raises TraceError."""
    rows = Rows(BLOCK_TOKENS)
    for number, row in json_rows(lines):
        at_s = seconds(row, "timestamp", number, 1e-3)
        rows.add(at_s, count(row, "input_length", number), count(row, "output_length", number), names(row, number))
    return rows.traffic()
