"""What one instance can do: prefill seconds and KV bytes of a prompt, decode tokens per second.

Presets are the PrfaaS case study's (arXiv 2604.15039): its own table where it prints one, else derived from its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np

from kvcache.layout import KVLayout
from scheduler.lengths import FloatArray
from scheduler.sizes import size_facts

Tokens = TypeVar("Tokens", float, FloatArray)

KILO = 1000.0


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """T_prefill(l) = ``c0_s`` + ``c1_s`` k + ``c2_s`` k^2 seconds on one idle instance, k = tokens / 1000.

    Raises ValueError where a coefficient is negative, for then T would fall with length.
    """

    name: str
    c0_s: float
    c1_s: float
    c2_s: float

    def __post_init__(self) -> None:
        if min(self.c0_s, self.c1_s, self.c2_s) < 0 or self.c0_s + self.c1_s + self.c2_s <= 0:
            raise ValueError(f"profile {self.name!r}: coefficients must not be negative nor all zero")

    def seconds(self, tokens: Tokens) -> Tokens:
        """T_prefill, elementwise."""
        k = tokens / KILO
        return self.c0_s + self.c1_s * k + self.c2_s * k * k


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """One decode instance: ``batch`` (BS_max) streams, each a token every ``step_s`` (T_decode) seconds."""

    batch: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """BS_max / T_decode."""
        return self.batch / self.step_s


@dataclass(frozen=True, slots=True)
class KvSize:
    """S_kv(l) in bytes: ``fixed`` states, ``per_token`` attention, and ``windows`` of (tokens held, bytes a token)."""

    fixed: float
    per_token: float
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, layout: KVLayout) -> KvSize:
        """Equal to ``layout.s_kv`` for every positive number of tokens."""
        sizes = size_facts(layout)
        return cls(sizes.state, sizes.per_token, sizes.windows)

    def nbytes(self, tokens: Tokens) -> Tokens:
        """S_kv, elementwise, for positive lengths."""
        total = self.fixed + self.per_token * tokens
        for held, nbytes in self.windows:
            total = total + nbytes * (tokens + held - abs(tokens - held)) / 2
        return total


def kv_bytes_per_s(kv: KvSize, prefill: PrefillProfile, tokens: float) -> float:
    """Equation 1: Phi_kv(l) = S_kv(l) / T_prefill(l) of one instance, bytes per second."""
    return kv.nbytes(tokens) / prefill.seconds(tokens)


def fit_prefill(name: str, tokens: Sequence[float], seconds: Sequence[float]) -> tuple[PrefillProfile, float]:
    """The profile of least squared relative error through the measured points, and its largest relative error.

    No coefficient is negative. Raises ValueError for fewer than three points or values that are not positive.
    """
    if len(tokens) != len(seconds) or len(tokens) < 3:
        raise ValueError(f"a fit needs at least three points, got {len(tokens)} lengths and {len(seconds)} times")
    if min(*tokens, *seconds) <= 0:
        raise ValueError("a fit needs positive lengths and times")
    k, measured = np.asarray(tokens) / KILO, np.asarray(seconds)
    columns = np.stack((np.ones_like(k), k, k * k), axis=1) / measured[:, None]
    best, least = np.zeros(3), np.inf
    # three columns: trying every set of them is the whole of non-negative least squares
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            solved = np.linalg.lstsq(columns[:, chosen], np.ones_like(k), rcond=None)[0]
            residual = float(np.sum((columns[:, chosen] @ solved - 1) ** 2))
            if np.all(solved >= 0) and residual < least:
                best, least = np.zeros(3), residual
                best[list(chosen)] = solved
    profile = PrefillProfile(name, *(float(c) for c in best))
    return profile, float(np.max(np.abs(columns @ best - 1)))


H200 = PrefillProfile("8 x H200", 0.3934, 0.04104, 1.003e-4)
"""Fitted to the paper's T_prefill of the 1T hybrid at 1K, 8K, 32K and 128K tokens."""

H20 = PrefillProfile("8 x H20", 0.467, 0.1302, 2.90e-4)
"""Derived from the case study's rates and times of its H20 instances; not measured by anyone."""

H20_DECODE = DecodeProfile(batch=20, step_s=0.025)
"""40 tokens/s a stream is published; BS_max 20 follows from the published Theta_pdd."""

CASE_STUDY_KV = KvSize(fixed=182_347_366, per_token=17_280)
"""S_kv of the 1T hybrid: fits the paper's table to 0.1 MiB."""
