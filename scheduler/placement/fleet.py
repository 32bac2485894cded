"""GPUs in NVLink domains, the experts that they hold, and what one request costs on one of them.

Modelled: all layers' experts are one set, a token's exchange with experts takes bytes over rate, inside the domain by
NVLink and outside by the network, and nothing competes for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Fleet:
    """``domain_of`` has the NVLink domain of each GPU, ``gpu_of`` the GPU of each expert. Rates in bytes per second.

    Raises ValueError where an expert is on no GPU, or a rate is not positive.
    """

    domain_of: tuple[int, ...]
    gpu_of: tuple[int, ...]
    inside_bytes_per_s: float
    outside_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.domain_of or not self.gpu_of:
            raise ValueError("a fleet needs GPUs and experts")
        if not all(0 <= gpu < len(self.domain_of) for gpu in self.gpu_of):
            raise ValueError(f"gpu_of: an expert is on none of the {len(self.domain_of)} GPUs")
        if min(self.inside_bytes_per_s, self.outside_bytes_per_s) <= 0:
            raise ValueError("rates must be positive")

    @cached_property
    def domains(self) -> dict[int, tuple[int, ...]]:
        """The GPUs of each domain."""
        return {d: tuple(g for g, at in enumerate(self.domain_of) if at == d) for d in sorted(set(self.domain_of))}

    def domain_loads(self, experts: Sequence[float]) -> dict[int, float]:
        """Which share of the tokens goes to each domain's experts, from tokens per expert; even for none at all.

        Raises ValueError where it is not one number for each expert, or one is negative.
        """
        if len(experts) != len(self.gpu_of):
            raise ValueError(f"experts: {len(experts)} numbers for {len(self.gpu_of)} experts")
        if min(experts) < 0:
            raise ValueError("experts: numbers of tokens must not be negative")
        total = sum(experts)
        loads = dict.fromkeys(self.domains, 0.0)
        for gpu, tokens in zip(self.gpu_of, experts, strict=True):
            loads[self.domain_of[gpu]] += tokens / total if total else 1 / len(experts)
        return loads

    def move_s(self, nbytes: float, source: int, target: int) -> float:
        """To move a cache from one GPU to another."""
        if source == target:
            return 0.0
        inside = self.domain_of[source] == self.domain_of[target]
        return nbytes / (self.inside_bytes_per_s if inside else self.outside_bytes_per_s)

    def exchange_s(self, nbytes: float, inside: float) -> float:
        """All-to-all with experts, of which a share ``inside`` stays in the domain."""
        return nbytes * (inside / self.inside_bytes_per_s + (1 - inside) / self.outside_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """One request that is about to be decoded.

    ``kv_bytes`` of its cache are on GPU ``cached_on``; decoding it exchanges ``exchange_bytes`` with experts.
    ``experts`` has how many of its prompt's tokens went to each, as counted while the prompt was read.
    """

    kv_bytes: float
    cached_on: int
    exchange_bytes: float
    experts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """Seconds of one request on one GPU."""

    gpu: int
    kv_s: float
    exchange_s: float
    queue_s: float

    @property
    def seconds(self) -> float:
        """The one cost that all policies are held to."""
        return self.kv_s + self.exchange_s + self.queue_s


def cost(fleet: Fleet, work: Work, gpu: int, queue_s: float, loads: dict[int, float]) -> PlacementCost:
    """KV transfer + all-to-all + queue. ``loads`` are the shares of the work's tokens by domain."""
    return PlacementCost(
        gpu,
        fleet.move_s(work.kv_bytes, work.cached_on, gpu),
        fleet.exchange_s(work.exchange_bytes, loads[fleet.domain_of[gpu]]),
        queue_s,
    )
