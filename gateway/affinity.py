"""Which nodes served a session before: its next request is a little better off there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_SESSIONS = 10_000
FORGET_AFTER_S = 3600.0
NOWHERE: frozenset[str] = frozenset()


class Affinity:
    """The newest sessions by tenant and name. Time is handed in."""

    def __init__(self, most: int = MAX_SESSIONS, forget_after_s: float = FORGET_AFTER_S) -> None:
        self._most = most
        self._forget_after_s = forget_after_s
        self._nodes: OrderedDict[tuple[str, str], tuple[frozenset[str], float]] = OrderedDict()

    def nodes(self, tenant: str, session: str | None, now: float) -> frozenset[str]:
        """Where it was served last; nothing for a session that is unknown or was long ago."""
        found = None if session is None else self._nodes.get((tenant, session))
        return NOWHERE if found is None or now - found[1] > self._forget_after_s else found[0]

    def served(self, tenant: str, session: str | None, nodes: Iterable[str], now: float) -> None:
        """It was served by these nodes; a request without a session is not kept."""
        if session is None:
            return
        self._nodes[tenant, session] = (frozenset(nodes), now)
        self._nodes.move_to_end((tenant, session))
        if len(self._nodes) > self._most:
            self._nodes.popitem(last=False)
