"""Qwen-Bailian traces: JSONL of timestamp in s, input_length, output_length, hash_ids of 16-token blocks.

Further fields (chat_id, parent_chat_id, type, turn) say which conversation a request is of; the blocks say it too.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.simulator.traces.reading import Rows, count, json_rows, names, seconds
from scheduler.simulator.traffic import Traffic

BLOCK_TOKENS = 16


def bailian(lines: Iterable[str]) -> Traffic:
    """Read one. Raises TraceError."""
    rows = Rows(BLOCK_TOKENS)
    for number, row in json_rows(lines):
        at_s = seconds(row, "timestamp", number)
        rows.add(at_s, count(row, "input_length", number), count(row, "output_length", number), names(row, number))
    return rows.traffic()
