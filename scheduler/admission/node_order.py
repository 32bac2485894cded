"""The order in which nodes take what was sent to them: fair between accounts, and short before long within one.

A job's rank is the virtual time at which it would be done if every account had its share of the nodes and divided that
evenly among its jobs there: present virtual time + the job's work + of each other job of its account as much as is done
of it meanwhile, which is at most as much as the job's own. So whoever has little on nodes comes before whoever has
much, and among one account's jobs a short one before long ones.

Virtual time passes as work is done, by the work over the weights of all who have any there (as in weighted fair
queueing, Demers, Keshav and Shenker 1989). So a job is passed by no more work than its rank was ahead of the time.
"""

from __future__ import annotations

TICKS_PER_S = 1_000_000
LAST = 1 << 60
"""What is to come after everything else has this added."""


class NodeOrder:
    """What each account has on nodes now, with its weight."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._there: dict[str, tuple[float, list[float]]] = {}

    def __len__(self) -> int:
        return sum(len(works) for _, works in self._there.values())

    def sent(self, account: str, work_s: float, weight: float, last: bool = False) -> int:
        """A job goes to nodes; returns its rank there. ``ended`` follows."""
        _, works = self._there.get(account, (weight, []))
        done = self._virtual + (work_s + sum(min(other, work_s) for other in works)) / weight
        works.append(work_s)
        self._there[account] = weight, works
        return round(done * TICKS_PER_S) + (LAST if last else 0)

    def ended(self, account: str, work_s: float) -> None:
        """It is over there."""
        self._virtual += work_s / sum(weight for weight, _ in self._there.values())
        _, works = self._there[account]
        works.remove(work_s)
        if not works:
            del self._there[account]
