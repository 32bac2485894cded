"""How much of the local prefill capacity fallbacks may use: a share of a sliding window. Time is handed in.

Of several gateways over the same nodes each has an even part of the share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BudgetValues:
    """``share`` of the local prefill seconds in ``window_s`` seconds; one fallback per window is always allowed."""

    share: float = 0.2
    window_s: float = 30.0


class FallbackBudget:
    """Admits fallbacks while what they spent in the window stays within the share.

    ``sharers`` tells how many budgets there are for the same nodes, this one among them.
    """

    def __init__(self, values: BudgetValues | None = None, sharers: Callable[[], int] = lambda: 1) -> None:
        self.values = values or BudgetValues()
        self._sharers = sharers
        self._spent: deque[tuple[float, float]] = deque()

    def admit(self, now: float, cost_s: float | None, nodes: int) -> bool:
        """Spend ``cost_s`` of the prefill seconds that ``nodes`` local nodes have in the window; False if beyond it.

        A cost of None was never measured: it is admitted only as the one fallback that a window always allows.
        """
        self._forget(now)
        if self._spent:
            limit = self.values.share * self.values.window_s * nodes / max(1, self._sharers())
            if cost_s is None or sum(cost for _, cost in self._spent) + cost_s > limit:
                return False
        self._spent.append((now, cost_s or 0.0))
        return True

    def retry_after_s(self, now: float) -> float:
        """Seconds until the oldest spending leaves the window; 0 where nothing is spent."""
        self._forget(now)
        return self._spent[0][0] + self.values.window_s - now if self._spent else 0.0

    def _forget(self, now: float) -> None:
        while self._spent and self._spent[0][0] + self.values.window_s <= now:
            self._spent.popleft()
