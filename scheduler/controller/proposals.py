"""What the controller would change, for a person to read, approve or refuse; bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum

import msgspec

MOST_KEPT = 256


class Verdict(StrEnum):
    """Where a proposal stands. ``OBSERVED`` ones ask nobody; the last four are over."""

    OBSERVED = "observed"
    OPEN = "open"
    APPROVED = "approved"
    AUTO = "auto"
    REFUSED = "refused"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    DONE = "done"

    @property
    def over(self) -> bool:
        """Whether nothing can come of it any more."""
        return self in (Verdict.REFUSED, Verdict.SUPERSEDED, Verdict.EXPIRED, Verdict.DONE)


class Proposal(msgspec.Struct, frozen=True):
    """One change of the split. ``prefill`` are nodes that prefill by kind, rates requests per second, gains ratios.

    ``gain_surely`` is what is left of the gain if the evidence errs against it; ``bottleneck`` the stage that is full
    first today; ``forecast`` says that it is for traffic expected from the days before, not for today's yet.
    """

    number: int
    at: float
    kinds: tuple[str, ...]
    prefill_now: tuple[int, ...]
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    threshold: float
    lambda_now: float
    lambda_then: float
    gain: float
    gain_surely: float
    rate: float
    output_tokens: float
    requests: int
    bottleneck: str
    forecast: bool
    reason: str
    verdict: Verdict
    decided_by: str = ""
    decided_at: float | None = None


class NoSuchProposal(LookupError):
    """No proposal of that number is open."""


class Proposals:
    """The newest proposals by number; at most one of them is not over."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Proposal] = OrderedDict()
        self._next = 1
        self._refused: tuple[tuple[int, ...], float, float] | None = None

    @property
    def all(self) -> Sequence[Proposal]:
        """Those kept, newest first."""
        return list(reversed(self._kept.values()))

    @property
    def current(self) -> Proposal | None:
        """The one that is not over."""
        newest = next(reversed(self._kept.values()), None)
        return None if newest is None or newest.verdict.over else newest

    def take_number(self) -> int:
        """The number of the next proposal."""
        self._next += 1
        return self._next - 1

    def put(self, proposal: Proposal) -> Proposal:
        """Keep a new one; the one before is over."""
        if self.current is not None:
            self.settle(Verdict.SUPERSEDED, proposal.at)
        self._kept[proposal.number] = proposal
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return proposal

    def settle(self, verdict: Verdict, now: float, by: str = "controller") -> None:
        """The current one is over, or approved."""
        current = self.current
        if current is not None:
            self._kept[current.number] = msgspec.structs.replace(
                current, verdict=verdict, decided_by=by, decided_at=now
            )

    def approve(self, number: int, by: str, now: float) -> Proposal:
        """A person wants it. Raises NoSuchProposal for one that is not open."""
        self._open(number)
        self.settle(Verdict.APPROVED, now, by)
        return self._kept[number]

    def refuse(self, number: int, by: str, now: float) -> Proposal:
        """A person does not want it. Raises NoSuchProposal for one that is not open."""
        proposal = self._open(number)
        self.settle(Verdict.REFUSED, now, by)
        self._refused = (proposal.prefill, proposal.gain, now)
        return self._kept[number]

    def refused(self, prefill: tuple[int, ...], gain: float, since: float, much_better: float = 1.1) -> bool:
        """Whether a person refused this split after ``since``, and it has not become much better meanwhile."""
        if self._refused is None:
            return False
        split, then, at = self._refused
        return split == prefill and at > since and gain < then * much_better

    def _open(self, number: int) -> Proposal:
        current = self.current
        if current is None or current.number != number or current.verdict is not Verdict.OPEN:
            raise NoSuchProposal(f"proposal {number} is not open; see which one is with `prfaas plan proposals`")
        return current
