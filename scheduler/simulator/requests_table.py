"""A run request by request, for a spreadsheet."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

from scheduler.simulator.run import Run

COLUMNS = (
    "request",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "remote",
    "wire_bytes",
    "ttft_s",
    "tpot_s",
    "done_s",
)


def rows(run: Run) -> Iterator[tuple[str | int | float, ...]]:
    """One row a request, in the order of ``COLUMNS``; empty where something did not happen."""
    records = run.records
    arrivals, prompts, outputs = (
        column.tolist() for column in (run.traffic.arrival_s, run.traffic.prompt_tokens, run.traffic.output_tokens)
    )
    for index, arrived in enumerate(arrivals):
        first, done = records.first_at[index], records.done_at[index]
        spoken = outputs[index] - 1
        yield (
            index,
            round(arrived, 6),
            prompts[index],
            outputs[index],
            records.cached_tokens[index],
            records.remote[index],
            round(records.wire_bytes[index]),
            "" if isnan(first) else round(first - arrived, 6),
            "" if isnan(done) or spoken < 1 else round((done - first) / spoken, 6),
            "" if isnan(done) else round(done, 6),
        )
