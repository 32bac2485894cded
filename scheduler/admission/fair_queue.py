"""The gateway's queue: fair between accounts by work, and within one by rank, which is set on arrival for good.

Between accounts it is start-time fair queueing (Goyal et al., SIGCOMM 1996) over predicted work: each has a virtual
time, the work that it was given divided by its weight, and whoever waits and has least is next. One that comes after a
pause begins at the present virtual time, so nobody saves up a right to be served first; what turns out to be more or
less work than predicted is settled afterwards. Two that wait all the time are never further apart than one request of
each.

Within an account the least *rank* is next: arrival + STRETCH x work + what its priority makes of it. So a request is
overtaken only by what comes within that time after it: that is the ageing. What is marked ``last`` (fallbacks, and long
prompts that only the state of the remote clusters keeps at home) comes when nothing else can be placed, in the same
order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

STRETCH = 2.0
"""How many times its own work a request may be overtaken by shorter ones."""
PRIORITY_S = 10.0
"""Waiting that one step of priority is worth."""
MOST_PRIORITY = 100
MOST_IDLE_ACCOUNTS = 4096


def rank(arrived: float, work_s: float, priority: int) -> float:
    """The order within an account, in seconds; the least is first. A lower ``priority`` is more urgent, as in vLLM."""
    return arrived + STRETCH * work_s + PRIORITY_S * max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request that waits. Of two with equal ``needs`` either both can be placed now or neither."""

    account: str
    work_s: float
    tokens: int
    rank: float
    weight: float = 1.0
    needs: Hashable = None
    last: bool = False


class QueueFull(Exception):
    """There is no room for a request, and nobody has more in the queue than its own account.

    ``what`` is full: ``requests`` or ``tokens``. ``own``: others wait, too, but its account has its share already.
    """

    def __init__(self, what: str, own: bool) -> None:
        super().__init__(what)
        self.what = what
        self.own = own


@dataclass(slots=True)
class _Account:
    """One account that waits: its lines by (last, needs), each in the order of rank."""

    weight: float
    lines: dict[tuple[bool, Hashable], list[tuple[float, int, Waiting]]] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0

    def first(self, last: bool, skip: Collection[Hashable]) -> Waiting | None:
        heads = [line[0] for (kind, needs), line in self.lines.items() if kind is last and needs not in skip]
        return min(heads)[-1] if heads else None

    def newest(self) -> Waiting:
        """The one that would come last."""
        return max((kind, line[-1]) for (kind, _), line in self.lines.items())[1][-1]

    def __iter__(self) -> Iterator[Waiting]:
        return (entry for line in self.lines.values() for _, _, entry in line)


class FairQueue:
    """At most ``most`` requests and ``most_tokens`` tokens of prompts wait; a single request always fits."""

    def __init__(self, most: int, most_tokens: int) -> None:
        self.most = most
        self.most_tokens = most_tokens
        self.tokens = 0
        self._accounts: dict[str, _Account] = {}
        self._numbers: dict[Waiting, int] = {}
        self._added = 0
        self._had: dict[str, float] = {}
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, entry: Waiting) -> bool:
        return entry in self._numbers

    @property
    def shares(self) -> dict[str, int]:
        """How many requests of each account wait."""
        return {name: account.requests for name, account in self._accounts.items()}

    def anybody_before(self, last: bool) -> bool:
        """Whether somebody waits whom a newcomer of that kind must let pass."""
        if last:
            return bool(self._numbers)
        return any(not kind for account in self._accounts.values() for kind, _ in account.lines)

    def anybody_last(self, needs: Hashable) -> bool:
        """Whether somebody waits who is marked ``last`` and has the same needs."""
        return any((True, needs) in account.lines for account in self._accounts.values())

    def add(self, entry: Waiting) -> list[Waiting]:
        """Let it wait. Returns those that lost their place to it: of accounts with more than its own has.

        Raises QueueFull where there is none: who fills the queue is the one to be refused.
        """
        pushed: list[tuple[Waiting, int]] = []
        while self._numbers:
            if len(self._numbers) >= self.most:
                what = "requests"
            elif self.tokens + entry.tokens > self.most_tokens:
                what = "tokens"
            else:
                break
            fullest = self._fullest(entry, what)
            if fullest == entry.account:
                for other, number in pushed:
                    self._put(other, number)
                raise QueueFull(what, own=entry.account in self._accounts and len(self._accounts) > 1)
            victim = self._accounts[fullest].newest()
            pushed.append((victim, self._numbers[victim]))
            self.remove(victim)
        self._added += 1
        self._put(entry, self._added)
        return [other for other, _ in pushed]

    def next(self, skip: Collection[Hashable] = ()) -> Waiting | None:
        """Whose turn it is, leaving out those that need what is known to be full."""
        order = sorted(self._accounts, key=lambda name: (self._had[name], name))
        for last in (False, True):
            for name in order:
                found = self._accounts[name].first(last, skip)
                if found is not None:
                    return found
        return None

    def take(self, entry: Waiting) -> None:
        """Its turn has come: it leaves the queue and its work is charged."""
        self.remove(entry)
        began = self._had[entry.account]
        self._virtual = max(self._virtual, began)
        self._had[entry.account] = began + entry.work_s / entry.weight

    def remove(self, entry: Waiting) -> None:
        """It waits no longer. Idempotent."""
        number = self._numbers.pop(entry, None)
        if number is None:
            return
        account = self._accounts[entry.account]
        line = account.lines[entry.last, entry.needs]
        line.remove((entry.rank, number, entry))
        if not line:
            del account.lines[entry.last, entry.needs]
        account.requests -= 1
        account.tokens -= entry.tokens
        self.tokens -= entry.tokens
        if not account.requests:
            del self._accounts[entry.account]

    def charge(self, account: str, work_s: float, weight: float) -> None:
        """An account is given that work while nobody waits. Nobody else had less for it, so no debt remains."""
        self._virtual = max(self._virtual, self._had.get(account, 0.0)) + work_s / weight
        self._had[account] = self._virtual
        if len(self._had) > MOST_IDLE_ACCOUNTS + len(self._accounts):
            self._forget()

    def settle(self, account: str, more_s: float, weight: float) -> None:
        """What an account was given was so much more work than was charged, or less."""
        if account in self._had:
            self._had[account] += more_s / weight

    def ahead_s(self, entry: Waiting) -> float:
        """Work that will be done before this one's turn, if nothing else comes and all goes as predicted.

        Its own account's of lesser rank, and of each other one as much as it is due meanwhile, or has.
        """
        own = self._accounts.get(entry.account)
        mine = 0.0 if own is None else sum(other.work_s for other in own if other.rank <= entry.rank and not other.last)
        total = mine
        for name, account in self._accounts.items():
            if name != entry.account:
                due = (mine + entry.work_s) / entry.weight * account.weight
                total += min(due, sum(other.work_s for other in account if not other.last))
        return total

    def _put(self, entry: Waiting, number: int) -> None:
        account = self._accounts.get(entry.account)
        if account is None:
            account = self._accounts[entry.account] = _Account(entry.weight)
            self._had[entry.account] = max(self._virtual, self._had.get(entry.account, 0.0))
        account.weight = entry.weight
        insort(account.lines.setdefault((entry.last, entry.needs), []), (entry.rank, number, entry))
        account.requests += 1
        account.tokens += entry.tokens
        self.tokens += entry.tokens
        self._numbers[entry] = number

    def _fullest(self, entry: Waiting, what: str) -> str:
        """Who has most of what is full for its weight, the newcomer counted; of equals the newcomer's account."""

        def share(name: str) -> tuple[float, bool]:
            account = self._accounts.get(name)
            has = 0 if account is None else account.requests if what == "requests" else account.tokens
            weight = entry.weight if account is None else account.weight
            mine = name == entry.account
            return (has + ((1 if what == "requests" else entry.tokens) if mine else 0)) / weight, mine

        return max({*self._accounts, entry.account}, key=share)

    def _forget(self) -> None:
        """Accounts that are not ahead of the present virtual time would begin there anyway."""
        self._had = {name: had for name, had in self._had.items() if had > self._virtual or name in self._accounts}
