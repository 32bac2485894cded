"""A request as a report sees it: what the gateway kept of it, without its decision's facts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from scheduler.lengths import FloatArray


class Shipment(msgspec.Struct, frozen=True, gc=False):
    """One attempt's work in a cluster: seconds of prefill, and the bytes that left it for a decode node."""

    cluster: str
    prefill_s: float
    wire_bytes: int


class Served(msgspec.Struct, frozen=True, gc=False):
    """One request. ``at`` is its arrival in Unix seconds, ``ttft_s`` from there to its first token, None without one.

    ``uncached_tokens`` had to be prefilled as the local cluster's caches stood: what the threshold tests.
    ``cached_tokens`` and ``output_tokens`` are known of finished answers alone, ``tpot_s`` of those with two tokens.
    """

    at: float
    prompt_tokens: int
    uncached_tokens: int
    finished: bool = False
    remote: bool = False
    fallback: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    shipments: tuple[Shipment, ...] = ()


class Window(msgspec.Struct, frozen=True):
    """The time that a report covers, Unix seconds, and how many requests arrived in it."""

    since: float
    until: float
    requests: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.until - self.since


def arrivals(requests: Sequence[Served]) -> FloatArray:
    """When they came, Unix seconds."""
    return np.asarray([one.at for one in requests], dtype=np.float64)


def first_tokens(requests: Sequence[Served]) -> FloatArray:
    """TTFT of each; infinite for one that had no first token."""
    return np.asarray([np.inf if one.ttft_s is None else one.ttft_s for one in requests], dtype=np.float64)


def quantile(values: FloatArray, q: float) -> float:
    """The least value that at least a share ``q`` of them does not exceed. There must be one."""
    return float(np.quantile(values, q, method="inverted_cdf"))
