"""Whose frame goes next to one peer: the transfer with the least left to send, but nobody waits for ever. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_KNOWN = 4096


class SendOrder:
    """Shortest remaining first, with ageing.

    A transfer's claim is what it has left, less what all others have sent since it came: the short overtake the long,
    but one with n bytes left is overtaken by less than n bytes. Time is counted in bytes, so that the order follows
    from what was sent alone, at whatever rate. What is known of transfers that fell silent is bounded.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._came: OrderedDict[bytes, int] = OrderedDict()
        self._left: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._came)

    def wants(self, transfer: bytes, left: int) -> None:
        """``transfer`` has a frame to send, and ``left`` bytes with it and after it."""
        if transfer not in self._came:
            self._came[transfer] = self._sent
            if len(self._came) > MAX_KNOWN:
                self.forget(next(iter(self._came)))
        self._left[transfer] = left

    def first(self, transfers: Iterable[bytes]) -> bytes:
        """Who of these goes next; of equal claims the first one's."""
        return min(transfers, key=self._claim)

    def sent(self, transfer: bytes, nbytes: int) -> None:
        """A frame of ``transfer`` has gone."""
        self._sent += nbytes
        left = self._left.get(transfer, 0) - nbytes
        if left > 0:
            self._left[transfer] = left
        else:
            self.forget(transfer)

    def forget(self, transfer: bytes) -> None:
        """``transfer`` is over; harmless when unknown."""
        self._came.pop(transfer, None)
        self._left.pop(transfer, None)

    def _claim(self, transfer: bytes) -> int:
        return self._left.get(transfer, 0) - (self._sent - self._came.get(transfer, self._sent))
