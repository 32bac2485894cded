"""In which order a prefill node takes what waits for it. Smaller keys go first; ties go to who came first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Order(StrEnum):
    """FCFS: as they came. SRPT: least remaining service first. AGED: least service first, but whoever waits gains."""

    FCFS = "fcfs"
    AGED = "aged"
    SRPT = "srpt"


@dataclass(frozen=True, slots=True)
class Ordering:
    """``slack``: under AGED a prompt of s seconds is due s x ``slack`` after it came, and the earliest due goes first.

    So a prompt waits for shorter ones only while they come within ``slack`` times the difference in service. Only under
    SRPT is a prompt that runs set aside, at a chunk's end: a long one that is nearly done should not wait again.
    """

    order: Order = Order.FCFS
    slack: float = 12.0

    def key(self, arrived: float, service_s: float, remaining_s: float) -> float:
        """The place of a prompt that came at ``arrived`` and has ``remaining_s`` of ``service_s`` left."""
        if self.order is Order.FCFS:
            return arrived
        if self.order is Order.SRPT:
            return remaining_s
        return arrived + self.slack * service_s

    @property
    def preempts(self) -> bool:
        """Whether a prompt that runs may be set aside."""
        return self.order is Order.SRPT


FIRST_COME = Ordering()
"""What is kept to unless somebody says otherwise."""
