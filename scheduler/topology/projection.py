"""The published comparison of ways within a cluster (arXiv 2607.28633), from layouts and rates alone.

All of it is modelled: the paper measured nothing, and neither does this. Rates are the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcache.layout import GroupKind, KVLayout
from scheduler.topology.pipeline import Pipelined, pipelined

SOURCE = "arXiv 2607.28633"
TOKENS = 4096
GB = 1e9

RATES: Mapping[str, float] = {"nvlink": 900 * GB, "infiniband": 50 * GB, "tcp": 12.5 * GB}
"""Bytes per second as published: NVLink 4 counts both directions, the others one."""
BASE = "infiniband"
"""What the speed-ups are over: every transfer by RDMA, wherever its ends are."""
PCIE_BYTES_PER_S = 63.0 * GB
"""Generation 5 with 16 lanes, one direction: 32 GT/s x 16 x 128/130 / 8. The paper prints no rate for it."""
PUBLISHED_MS: Mapping[str, float] = {"nvlink": 1.49, "infiniband": 26.8, "tcp": 107.0}
PUBLISHED_HIDDEN = "60-85 % (v1), 76-100 % (v2)"
PUBLISHED_SPEEDUP = (3.0, 18.0)

PFLOPS, UTILISATION, GPUS = 0.989e15, 0.4, 8
"""What computes a layer: 8 x H100 at 989 dense bf16 TFLOP/s, of which 40 % are reached. Assumed."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as the projection needs it; ``active_parameters`` are what one token runs through."""

    name: str
    kind: str
    layout: KVLayout
    active_parameters: float
    source: str


@dataclass(frozen=True, slots=True)
class WayFigures:
    """One way for one architecture: whole transfers, and the same beside the computation of their layers."""

    bytes_per_s: float
    transfer_s: float
    speedup: float
    pipeline: Pipelined


@dataclass(frozen=True, slots=True)
class Figures:
    """One architecture at ``tokens``."""

    architecture: Architecture
    tokens: int
    nbytes: int
    compute_s: float
    ways: Mapping[str, WayFigures]


@dataclass(frozen=True, slots=True)
class Limit:
    """Where the largest speed-up does not hold: what it is there, and why."""

    case: str
    speedup: float
    why: str


def layer_bytes(layout: KVLayout, tokens: int) -> tuple[int, ...]:
    """Bytes of each layer after ``tokens`` tokens, in the order in which layers are computed. Sums to S_kv."""
    sizes = []
    for group in layout.groups:
        held = 1 if group.kind is GroupKind.STATE else tokens - group.first_token(tokens)
        sizes += [(layer.index, held * layer.nbytes) for layer in group.layers]
    return tuple(nbytes for _, nbytes in sorted(sizes))


def project(architecture: Architecture, tokens: int = TOKENS) -> Figures:
    """Times, speed-ups over uniform RDMA and shares hidden of every way. Raises ValueError for no tokens."""
    if tokens < 1:
        raise ValueError(f"tokens must be positive, got {tokens}")
    sizes = layer_bytes(architecture.layout, tokens)
    compute_s = 2 * architecture.active_parameters * tokens / (PFLOPS * UTILISATION * GPUS)
    each = [compute_s / len(sizes)] * len(sizes)
    ways = {}
    for name, rate in {**RATES, "pcie": PCIE_BYTES_PER_S}.items():
        seconds = sum(sizes) / rate
        beside = pipelined(each, [nbytes / rate for nbytes in sizes])
        ways[name] = WayFigures(rate, seconds, sum(sizes) / RATES[BASE] / seconds, beside)
    return Figures(architecture, tokens, sum(sizes), compute_s, ways)


def mixed_speedup(inside: float, others: float = 1.0, best: float = RATES["nvlink"] / RATES[BASE]) -> float:
    """Of mean transfer time, where a share ``inside`` of all transfers gains ``best`` and the rest ``others``."""
    if not 0 <= inside <= 1:
        raise ValueError(f"inside is a share, got {inside}")
    return 1 / (inside / best + (1 - inside) / others)


def share_for(speedup: float) -> float:
    """The share of transfers that must stay inside an NVLink domain for this speed-up of the mean."""
    best = RATES["nvlink"] / RATES[BASE]
    if not 1 <= speedup <= best:
        raise ValueError(f"speedup must be from 1 to {best:g}, got {speedup}")
    return (1 - 1 / speedup) / (1 - 1 / best)


def limits(figures: Sequence[Figures], setup_s: float = 100e-6) -> tuple[Limit, ...]:
    """Where 18 x is not had, and what is had there.

    ``setup_s`` is what any way takes before its first byte in the case that has one.
    """
    best, base = RATES["nvlink"], RATES[BASE]
    smallest = min(figures, key=lambda one: one.nbytes)
    short = layer_bytes(smallest.architecture.layout, 256)
    exposed = {way: smallest.ways[way].pipeline.exposed_s for way in ("nvlink", BASE)}
    ttft = {way: smallest.compute_s + seconds for way, seconds in exposed.items()}
    name = smallest.architecture.name
    return (
        Limit("one host, two domains", PCIE_BYTES_PER_S / base, "the way is PCIe"),
        Limit("two hosts", 1.0, "the way is RDMA, as for everybody"),
        Limit("NVLink counted as RDMA is, one direction", best / 2 / base, "900 GB/s is the sum of both directions"),
        Limit("RDMA over 8 ports at once", best / (8 * base), "a machine of 8 GPUs commonly has a port for each"),
        Limit("half of the transfers in one domain", mixed_speedup(0.5), "the mean is what the other half takes"),
        Limit(
            f"{name}, 256 tokens, {setup_s * 1e6:g} us to begin",
            (setup_s + sum(short) / base) / (setup_s + sum(short) / best),
            "small caches take as long to begin as to move",
        ),
        Limit(
            f"time to first token of {name}",
            ttft[BASE] / ttft["nvlink"],
            "layers that leave while the next is computed hide both ways",
        ),
    )
