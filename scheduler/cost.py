"""What an option costs beyond its own time to first token: the waiting that it causes, and money."""

from __future__ import annotations

from scheduler.facts import Prices

BYTES_PER_GB = 1e9


def waiting_s(weight_per_s: float, wait_s: float, service_s: float) -> float:
    """Seconds that ``service_s`` more work adds to the waiting of others, in a queue that takes ``wait_s`` already.

    weight x (pool's wait) x (service time added), with a weight of 0.3 per second, is the best routing rule found in
    simulations of the PrfaaS case study: where nobody waits work is free, in a long queue it delays everybody.
    """
    return weight_per_s * wait_s * service_s


def price(prices: Prices, hour: int, prefill_s: float, egress_bytes: float) -> float:
    """What a cluster charges in that hour of the day (UTC) for computing and for what leaves it."""
    factor = prices.by_hour[hour % 24] if prices.by_hour else 1.0
    return factor * (prefill_s * prices.prefill_per_s + egress_bytes / BYTES_PER_GB * prices.egress_per_gb)
