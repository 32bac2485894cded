"""What a node's credentials say of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Newcomer:
    """None for what they leave open. ``until`` is when they end (wall clock), ``epoch`` of which epoch they are."""

    cluster: str | None = None
    node_id: str | None = None
    until: float | None = None
    epoch: int = 0
