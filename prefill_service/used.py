"""Transfer ids that were used already: a ticket works once, however often it is shown until it expires."""

from __future__ import annotations

import heapq


class UsedTransfers:
    """Remembers each id until its ticket's deadline. All times are Unix seconds."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._expiry: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._known)

    def forget(self, now: float) -> None:
        """Those that have expired."""
        while self._expiry and self._expiry[0][0] < now:
            self._known.discard(heapq.heappop(self._expiry)[1])

    def add(self, transfer: bytes, until: float, now: float) -> None:
        """Remember ``transfer`` until the time ``until``, and forget what has expired by ``now``."""
        self.forget(now)
        if transfer not in self._known:
            self._known.add(transfer)
            heapq.heappush(self._expiry, (until, transfer))

    def __contains__(self, transfer: bytes) -> bool:
        return transfer in self._known
