"""The threshold in force: what an operator set, until the long-term controller finds a better one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Threshold:
    """Uncached tokens above which a prompt is prefilled remotely. ``reason`` says who set it and why."""

    tokens: int
    reason: str = "set at the start"
