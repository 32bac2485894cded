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


def threshold_s(weight_s: float, service_s: float, at_threshold_s: float, cluster_at_threshold_s: float) -> float:
    """What the threshold in force makes of a prompt of ``service_s``, in seconds, on a node of some cluster.

    The threshold says how long prompts are to be divided, not who waits. Of one as long as it, which takes the node
    ``at_threshold_s`` and the quickest node of its cluster ``cluster_at_threshold_s``, the cost without any wait is
    ``weight_s`` everywhere: where nobody waits it divides as a rule would. Longer and shorter ones cost in proportion
    to their service, which grows less with length where nodes are made for long ones. So each second of a cluster's
    time has the price that the threshold implies, and it takes a difference of queues to move a prompt to the other
    side: the greater the farther it is from the threshold.
    """
    return weight_s * service_s / at_threshold_s - cluster_at_threshold_s


def price(prices: Prices, hour: int, prefill_s: float, egress_bytes: float) -> float:
    """What a cluster charges in that hour of the day (UTC) for computing and for what leaves it."""
    factor = prices.by_hour[hour % 24] if prices.by_hour else 1.0
    return factor * (prefill_s * prices.prefill_per_s + egress_bytes / BYTES_PER_GB * prices.egress_per_gb)
