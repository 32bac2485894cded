"""Our own decision log, JSONL with a record a request: yesterday's traffic against another policy or fleet.

Of a record the arrival, the prompt, the answer's length and what was cached count; a request that got no answer is
replayed as one of a single token. Cached prefixes have no names in a record: they are taken off the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.simulator.traces.reading import Rows, TraceError, count, json_rows, seconds
from scheduler.simulator.traffic import Traffic


def decisions(lines: Iterable[str]) -> Traffic:
    """Read one. Raises TraceError."""
    rows = Rows()
    for number, row in json_rows(lines):
        if "at" not in row:
            continue  # a header line
        usage = row.get("usage")
        decision = row.get("decision")
        if isinstance(usage, dict):
            prompt = count(usage, "prompt_tokens", number) - count(usage, "cached_tokens", number)
            output = count(usage, "completion_tokens", number)
        elif isinstance(decision, dict):
            facts = decision.get("facts")
            request = facts.get("request") if isinstance(facts, dict) else None
            if not isinstance(request, dict):
                raise TraceError(f"line {number}: decision.facts.request is missing")
            prompt, output = count(request, "prompt_tokens", number), 1
        else:
            continue  # refused before it was routed
        rows.add(seconds(row, "at", number), prompt, output)
    return rows.traffic()
