"""One order for the jobs of several gateways: each numbers its own by a clock of its own, which says nothing to others.

A gateway's rank is the virtual time at which a job would be done. What counts here is how far that is ahead of the
gateway's own time, which the ranks of its jobs that have begun tell; it is put ahead of the node's, which passes as
jobs of any gateway begin (start-time fair queueing, Goyal, Vin and Cheng 1996). So a gateway that has run for long does
not stand behind one that was just started, none is passed for ever, and of one gateway alone the order is its own.
"""

from __future__ import annotations

from scheduler.admission.node_order import LAST


class Ranks:
    """Of jobs that wait for one thing. Every job that was ranked begins or ends."""

    def __init__(self) -> None:
        self._time = 0
        self._times: dict[str, int] = {}
        self._waiting: dict[str, tuple[str, int, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, gateway: str, job: str, rank: int) -> int:
        """Where a gateway's job stands among all; what is to come last still does."""
        last = LAST if rank >= LAST else 0
        own = rank - last
        here = self._time + own - self._times.setdefault(gateway, own)
        self._waiting[job] = gateway, own, here
        return here + last

    def began(self, job: str) -> None:
        """Its turn has come. What is not known here, or not any more, changes nothing."""
        found = self._waiting.pop(job, None)
        if found is not None:
            gateway, own, here = found
            self._time = max(self._time, here)
            self._times[gateway] = max(self._times[gateway], own)

    def ended(self, job: str) -> None:
        """It is over, begun or not."""
        self._waiting.pop(job, None)

    def left(self, gateway: str) -> None:
        """A gateway is gone with its jobs; its clock begins anew when it comes back."""
        self._times.pop(gateway, None)
        self._waiting = {job: one for job, one in self._waiting.items() if one[0] != gateway}
