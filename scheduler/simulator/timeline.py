"""A run as a trace viewer shows it: Chrome's trace event format, which Perfetto and about:tracing open.

One track a node and link. Prefills overlap on none; transfers and streams do, so they are asynchronous events.
"""

from __future__ import annotations

from math import isnan
from typing import Any

from scheduler.simulator.records import Spans
from scheduler.simulator.run import Run

MICRO = 1e6


def timeline(run: Run, spans: Spans) -> dict[str, Any]:
    """The document to write as JSON. Times are microseconds since the run began."""
    tracks = {name: number for number, name in enumerate(sorted({span.track for span in spans.kept}), start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in tracks.items()
    ]
    for number, span in enumerate(spans.kept):
        base = {"pid": 1, "tid": tracks[span.track], "name": f"{span.name} {span.request}", "cat": span.name}
        arguments = {
            "request": span.request,
            "prompt_tokens": int(run.traffic.prompt_tokens[span.request]),
            "output_tokens": int(run.traffic.output_tokens[span.request]),
        }
        begin, end = span.begin_s * MICRO, span.end_s * MICRO
        if span.name == "prefill":
            events.append(base | {"ph": "X", "ts": begin, "dur": end - begin, "args": arguments})
        else:
            events.append(base | {"ph": "b", "id": number, "ts": begin, "args": arguments})
            events.append(base | {"ph": "e", "id": number, "ts": end})
    for converted in run.records.conversions:
        served = run.ended_at if isnan(converted.served_at) else converted.served_at
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks.get(converted.node, 0),
                "name": f"becomes {converted.to}",
                "cat": "conversion",
                "ts": converted.asked_at * MICRO,
                "dur": (served - converted.asked_at) * MICRO,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
