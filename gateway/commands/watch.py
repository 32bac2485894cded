"""``prfaas status --watch``: nodes, links, queue and rates of a gateway, again and again on one screen."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.commands.client import Api, seconds, size

_COUNTED = {
    "requests/s": "prfaas_requests_total",
    "prompt tokens/s": "prfaas_prompt_tokens_total",
    "tokens/s": "prfaas_generation_tokens_total",
    "refused/s": "prfaas_refused_total",
}
"""Rates by the counters that they are the growth of."""
_SAMPLE = re.compile(r"^(prfaas_\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Look:
    """What a gateway said at one time (seconds): its status, and the sums of its counters over all labels."""

    at: float
    status: Mapping[str, Any]
    sums: Mapping[str, float]


def look(api: Api, clock: Callable[[], float] = time.monotonic) -> Look:
    """Ask. Raises ClickException."""
    status, text = api.call("GET", "/v1/status"), io.BytesIO()
    api.download("/metrics", text)
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text.getvalue().decode()):
        sums[name] = sums.get(name, 0.0) + float(value)
    return Look(clock(), status, sums)


def rates(before: Look | None, now: Look) -> dict[str, float | None]:
    """A second, between two looks; None before the second one, and where a gateway began anew."""
    found: dict[str, float | None] = dict.fromkeys(_COUNTED)
    for name, counter in _COUNTED.items():
        if before is not None and now.at > before.at:
            grown = now.sums.get(counter, 0.0) - before.sums.get(counter, 0.0)
            found[name] = grown / (now.at - before.at) if grown >= 0 else None
    return found


def screen(before: Look | None, now: Look) -> RenderableType:
    """One look as a person reads it."""
    found = now.status
    ready = Text("ready", "green") if found["ready"] else Text(f"not ready: {found['reason']}", "red")
    queue, shown = found["queue"], rates(before, now)
    model = "engines alone" if found["model"] is None else found["model"]["id"]
    running = now.sums.get("prfaas_num_requests_running", 0.0)
    return Group(
        Text.assemble(ready, f"  {model}, threshold {found['threshold_tokens']} tokens"),
        Text(", ".join(f"{'-' if rate is None else f'{rate:,.1f}'} {name}" for name, rate in shown.items())),
        Text(f"{running:.0f} requests are served, {queue['waiting']} of at most {queue['queue']} wait"),
        Text(),
        _table(("node", "cluster", "role", "state", "jobs", "queued tokens", "pages used", "prefill/s"), _nodes(found)),
        Text(),
        _table(("cluster", "state", "accepting", "link", "rtt", "queueing", "in use", ""), _links(found)),
    )


def watch(api: Api, every_s: float, console: Console | None = None, looks: int | None = None) -> None:
    """Show it until Ctrl-C, or for so many looks. A gateway that is away for a while is asked again."""
    before: Look | None = None
    with Live(console=console, auto_refresh=False, screen=console is None) as live:
        done = 0
        try:
            while looks is None or done < looks:
                if done:
                    time.sleep(every_s)
                done += 1
                try:
                    now = look(api)
                except click.ClickException as error:
                    live.update(Text(f"{error.message}; asking again every {every_s:g} s", "red"), refresh=True)
                    before = None
                    continue
                live.update(screen(before, now), refresh=True)
                before = now
        except KeyboardInterrupt:
            return


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _nodes(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for node in found["nodes"]:
        beat, speed = node["heartbeat"] or {}, node["prefill_tokens_per_s"]
        state = f"becoming {node['becoming']}" if node["becoming"] else "accepting" if node["accepting"] else ""
        pages = f"{1 - beat['pages_free'] / beat['pages_total']:.0%}" if beat.get("pages_total") else "-"
        rows.append(
            (
                node["node_id"],
                node["cluster"],
                node["role"],
                state or beat.get("detail") or "not accepting",
                str(node["jobs"]),
                f"{node['queued_tokens']:,}",
                pages,
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
    return rows


def _links(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in found["clusters"]:
        link = one["link"]
        rate, use = size(link["bytes_per_s"]), link["utilisation"]
        rows.append(
            (
                one["name"],
                one["state"],
                f"{one['accepting']}/{one['nodes']}",
                "-" if rate is None else f"{rate}/s",
                seconds(link["rtt_s"]) or "-",
                seconds(link["queueing_s"]) or "-",
                "-" if use is None else f"{use:.0%}",
                "dead" if link["dead"] else "congested" if link["congested"] else "",
            )
        )
    return rows
