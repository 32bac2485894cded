"""How a cluster's way out is shared by its nodes. Pure."""

from __future__ import annotations


def lease(egress_bytes_per_s: float, others_sending: int) -> float:
    """What one node may send at, beside ``others_sending`` that send now: an equal share, 0 (no limit) of 0.

    A node that is idle gets what it would get if it began now, so it need not wait for its next lease to begin. Until
    then the others keep theirs, so for a second at most the cluster may send more than it should.
    """
    return egress_bytes_per_s / (others_sending + 1)
