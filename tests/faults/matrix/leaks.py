"""What processes hold, by what they say themselves: counted before a fault, and after it once nothing is at hand.

A node's files are counted without its KV connections, which it keeps to every peer that it has met, as it says itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

SPARE = 2
"""Tasks or files more than before that say nothing: a connection that is just being made, a timer's task."""
_GAUGES = {
    "requests": r"^prfaas_num_requests_running (\S+)$",
    "tasks": r"^prfaas_tasks (\S+)$",
    "files": r"^process_open_fds (\S+)$",
}
_AT_HAND = ("queued_jobs", "queued_tokens", "running", "open_transfers")


@dataclass(frozen=True, slots=True)
class Held:
    """By process and what is counted. ``held`` must be 0 when idle; ``kept`` must not grow."""

    held: dict[str, float] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)

    def leaks(self, before: Held) -> dict[str, str]:
        """What is held though nothing is at hand, and what grew."""
        found = {name: f"{value:g} held" for name, value in self.held.items() if value}
        for name, value in self.kept.items():
            was = before.kept.get(name)
            if was is None:
                found[name] = "was not there before"
            elif value > was + SPARE:
                found[name] = f"{was:g} before, {value:g} now"
        found |= {name: "is gone" for name in before.kept if name not in self.kept}
        return found


def count(http: httpx.Client, below: Mapping[str, float]) -> Held:
    """What is held now by a gateway and its nodes, with what the processes that they have started keep."""
    status = http.get("/v1/status").json()
    text = http.get("/metrics").text
    found = held_by(status, {name: _gauge(text, pattern) for name, pattern in _GAUGES.items()})
    return Held(found.held, {**found.kept, **below})


def held_by(status: Mapping[str, Any], gateway: Mapping[str, float]) -> Held:
    """From ``/v1/status`` and the gateway's own gauges."""
    held = {"gateway.requests": gateway["requests"], "gateway.waiting": status["queue"]["waiting"]}
    kept = {"gateway.tasks": gateway["tasks"], "gateway.files": gateway["files"]}
    for cluster in status["clusters"]:
        held[f"{cluster['name']}.queued_bytes"] = cluster["link"]["queued_bytes"]
    for node in status["nodes"]:
        name, said = node["node_id"], node["heartbeat"]
        held[f"{name}.slots"] = node["jobs"]
        if said is None:
            held[f"{name}.silent"] = 1
            continue
        held[f"{name}.blocks"] = said["pages_total"] - said["pages_free"]
        held |= {f"{name}.{what}": said[what] for what in _AT_HAND}
        kept[f"{name}.tasks"] = said["tasks"]
        kept[f"{name}.files"] = said["files"] - sum(link["connections"] for link in said["links"])
    return Held(held, kept)


def tickets(http: httpx.Client) -> int:
    """Tickets that nodes still remember; none once the deadlines of all are over."""
    nodes = http.get("/v1/nodes").json()["nodes"]
    return sum(node["heartbeat"]["tickets"] for node in nodes if node["heartbeat"] is not None)


def _gauge(text: str, pattern: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, f"no gauge {pattern}"
    return float(found[1])
