"""A what-if question: changes to a basis, every one optional and every one checked by name."""

from __future__ import annotations

from math import isfinite

import msgspec

from scheduler.facts import Prices

PRESETS = ("case-study",)
MOST_REQUESTS = 100_000
MOST_NODES = 10_000
MOST_SCALE = 1000.0
MOST_RATE = 1e6
EVERY = "*"
"""Stands for every remote cluster, in ``link_gbps`` and ``prices``."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``preset`` None asks about the running gateway. Clusters are named as they are registered.

    ``add_nodes`` by cluster, negative to take away; ``link_gbps`` and ``prices`` by remote cluster or ``*``. Scales
    multiply the rate, the uncached input and the answers. ``rate`` in requests per second replaces the observed one,
    before it is scaled. ``prefill`` (local nodes) and ``threshold`` (tokens) fix what would otherwise be searched.
    ``requests`` bounds the simulation of each case. Raises ValueError naming the field.
    """

    preset: str | None = None
    add_nodes: dict[str, int] = {}
    link_gbps: dict[str, float] = {}
    prices: dict[str, Prices] = {}
    traffic_scale: float = 1.0
    input_scale: float = 1.0
    output_scale: float = 1.0
    rate: float | None = None
    prefill: int | None = None
    threshold: int | None = None
    requests: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset: no preset is named {self.preset[:40]!r}; there is {', '.join(PRESETS)}")
        for name in ("traffic_scale", "input_scale", "output_scale"):
            value = getattr(self, name)
            if not (isfinite(value) and 0 < value <= MOST_SCALE):
                raise ValueError(f"{name}: must be above 0 and at most {MOST_SCALE:g}, got {value}")
        if self.rate is not None and not 0 < self.rate <= MOST_RATE:
            raise ValueError(f"rate: must be above 0 and at most {MOST_RATE:g}, got {self.rate}")
        for name, least, most in (
            ("requests", 100, MOST_REQUESTS),
            ("seed", 0, 2**32 - 1),
            ("prefill", 0, MOST_NODES),
            ("threshold", 0, 1 << 30),
        ):
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                raise ValueError(f"{name}: must be from {least} to {most}, got {number}")
        for cluster, nodes in self.add_nodes.items():
            if abs(nodes) > MOST_NODES:
                raise ValueError(f"add_nodes.{cluster[:63]}: at most {MOST_NODES} either way, got {nodes}")
        for cluster, gbps in self.link_gbps.items():
            if not (isfinite(gbps) and gbps > 0):
                raise ValueError(f"link_gbps.{cluster[:63]}: must be positive, got {gbps}")
        for cluster, prices in self.prices.items():
            if not all(isfinite(value) and value >= 0 for value in (prices.egress_per_gb, prices.prefill_per_s)):
                raise ValueError(f"prices.{cluster[:63]}: must not be negative")
            if prices.by_hour and (len(prices.by_hour) != 24 or not all(0 <= f < 1e6 for f in prices.by_hour)):
                raise ValueError(f"prices.{cluster[:63]}.by_hour: takes 24 factors from 0 up, or none")
