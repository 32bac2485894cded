"""Which nodes of a large cluster a decision needs to look at: those that hold something, and the least loaded.

A decision is a few microseconds a node, so facts are built for these alone. What is left out could not win: another
node of its cluster has less to do and holds no less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar

KEEP = 2


class Worker(Protocol):
    """What trimming looks at; a node's facts and its session at the gateway both have it."""

    @property
    def node_id(self) -> str:
        """Its name, by which it is matched."""

    @property
    def free_slots(self) -> int:
        """Jobs that it may still take."""


W = TypeVar("W", bound=Worker)


def candidates(
    nodes: Sequence[W],
    load: Callable[[W], float],
    held: Mapping[str, int],
    session: Collection[str] = (),
    keep: int = KEEP,
) -> list[W]:
    """The ``keep`` least loaded, the ``keep`` that hold most and the session's own, each once, in any order.

    ``held`` is what they hold by node id, in any unit; one that is not in it holds nothing. Nodes without a free slot
    are left out, unless all are: that a cluster is full is a fact, too.
    """
    if len(nodes) <= keep:
        return list(nodes)
    free = [node for node in nodes if node.free_slots > 0]
    if not free:
        return list(nodes[:1])
    chosen = _least(free, list(map(load, free)), keep)
    names = {node.node_id for node in chosen} if held or session else set()
    if held:
        most = [node for node in free if node.node_id in held and node.node_id not in names]
        if len(most) > keep:
            most.sort(key=lambda node: (-held[node.node_id], load(node), node.node_id))
        chosen += most[:keep]
    if session:
        names.update(node.node_id for node in chosen)
        chosen += [node for node in free if node.node_id in session and node.node_id not in names]
    return chosen


def _least(nodes: list[W], loads: list[float], keep: int) -> list[W]:
    """The ``keep`` nodes of least load; of equal ones the first by name."""
    if len(nodes) <= keep:
        return list(nodes)
    limit = sorted(loads)[keep - 1]
    chosen = [node for node, its in zip(nodes, loads, strict=True) if its <= limit]
    if len(chosen) == keep:
        return chosen
    ranked = [(its, node.node_id, node) for node, its in zip(nodes, loads, strict=True) if its <= limit]
    ranked.sort(key=itemgetter(0, 1))
    return [node for _, _, node in ranked[:keep]]
