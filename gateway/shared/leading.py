"""Who leads among several gateways: whoever Redis gave the lead last, for as long as the lease certainly runs.

Epochs are a term, which rises with every election, and a count within it: an order of an earlier leader is below every
order of a later one, and a node that has obeyed the later one refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from gateway.errors import ApiError
from gateway.shared.roster import Roster

TERM_BITS = 20
"""Orders that one leader may give within its term, as a power of two."""


class SharedLeadership:
    """``Leadership`` as the roster has it. ``keep`` is told each epoch before it is given out."""

    def __init__(self, roster: Roster, keep: Callable[[int], None], clock: Callable[[], float] = monotonic) -> None:
        self._roster = roster
        self._keep = keep
        self._clock = clock
        self._term = 0
        self._count = 0

    @property
    def leads(self) -> bool:
        """Whether nobody else can have been made leader yet."""
        return self._roster.leads(self._clock())

    @property
    def leader(self) -> str:
        """Where the leader is reached; "" where none is known."""
        return self._roster.leader_url

    def next_epoch(self) -> int:
        """Also for a gateway whose lead has lapsed and that undoes what it began: whoever leads now is above it."""
        term = self._roster.own_term
        if not term:
            raise ApiError(503, "no gateway leads that could number orders", code="no_leader", retry_after_s=1)
        if term != self._term:
            self._term, self._count = term, 0
        self._count += 1
        if self._count >> TERM_BITS:
            raise ApiError(503, "this leader has given all orders of its term", code="no_leader", retry_after_s=1)
        epoch = term << TERM_BITS | self._count
        self._keep(epoch)
        return epoch
