"""What clusters computed and sent in the window, what their links carry, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import msgspec
import numpy as np

from scheduler.cost import price
from scheduler.facts import Prices
from scheduler.report.requests import Served, Window

BITS_PER_GBIT = 1e9
MOST_SLICES = 48
HOUR_S = 3600.0


class Site(msgspec.Struct, frozen=True):
    """A cluster as an operator registered it and as it was learnt.

    ``link_bytes_per_s`` is the learnt rate of the way home, None where nothing is known; ``limit_bytes_per_s`` what the
    operator lets it send, None without a limit.
    """

    name: str
    local: bool
    prices: Prices
    link_bytes_per_s: float | None = None
    limit_bytes_per_s: float | None = None


class ClusterUse(msgspec.Struct, frozen=True):
    """One cluster's part. Rates in Gbps, ``gigabytes`` decimal, money in whatever currency prices were given in.

    ``peak_gbps`` is that of the busiest slice, ``slices`` the mean rate in each; the bytes of a request count where it
    arrived. ``capacity_gbps`` is the lower of link and limit, None where neither is known. ``priced`` is False where
    the operator named no prices.
    """

    name: str
    local: bool
    requests: int
    prefill_s: float
    gigabytes: float
    mean_gbps: float
    peak_gbps: float
    link_gbps: float | None
    limit_gbps: float | None
    capacity_gbps: float | None
    priced: bool
    cost: float
    cost_per_hour: float
    slices: tuple[float, ...]


class Egress(msgspec.Struct, frozen=True):
    """``slice_s`` is the width of every cluster's slices, the first of which begins with the window."""

    slice_s: float
    clusters: tuple[ClusterUse, ...]


def egress(requests: Sequence[Served], sites: Sequence[Site], window: Window) -> Egress:
    """Every site of ``sites``, and every other cluster that requests went to, which has left since."""
    known = {site.name for site in sites}
    gone = sorted({work.cluster for one in requests for work in one.shipments} - known)
    slices = int(min(MOST_SLICES, max(1, len(requests) // 4)))
    width = max(window.seconds, 1e-3) / slices
    every = [*sites, *(Site(name, False, Prices()) for name in gone)]
    return Egress(width, tuple(_use(site, requests, window, slices, width) for site in every))


def _use(site: Site, requests: Sequence[Served], window: Window, slices: int, width: float) -> ClusterUse:
    nbytes = np.zeros(slices)
    prefill_s = cost = 0.0
    count = 0
    for one in requests:
        mine = [work for work in one.shipments if work.cluster == site.name]
        count += bool(mine)
        for work in mine:
            place = min(max(int((one.at - window.since) / width), 0), slices - 1)
            nbytes[place] += work.wire_bytes
            prefill_s += work.prefill_s
            hour = int(one.at // HOUR_S) % 24
            # what stays at home leaves no cluster, and costs no egress
            cost += price(site.prices, hour, work.prefill_s, 0 if site.local else work.wire_bytes)
    gbps = nbytes * 8 / BITS_PER_GBIT / width
    link, limit = _gbps(site.link_bytes_per_s), _gbps(site.limit_bytes_per_s)
    bounds = [bound for bound in (link, limit) if bound is not None]
    return ClusterUse(
        name=site.name,
        local=site.local,
        requests=count,
        prefill_s=prefill_s,
        gigabytes=float(nbytes.sum()) / 1e9,
        mean_gbps=float(gbps.mean()),
        peak_gbps=float(gbps.max()),
        link_gbps=link,
        limit_gbps=limit,
        capacity_gbps=min(bounds) if bounds else None,
        priced=bool(site.prices.egress_per_gb or site.prices.prefill_per_s),
        cost=cost,
        cost_per_hour=cost / window.seconds * HOUR_S if window.seconds > 0 else 0.0,
        slices=tuple(float(rate) for rate in gbps),
    )


def _gbps(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None or not isfinite(bytes_per_s) else bytes_per_s * 8 / BITS_PER_GBIT
