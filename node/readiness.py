"""Whether this node takes jobs, and what keeps it from that: it drains, changes its role, or has no engine."""

from __future__ import annotations

from kvcache.room import PageRoom
from node.keeper import EngineKeeper
from node.roles import NodeRole


class Readiness:
    """As of now. ``draining`` is for good: set once the node is to end."""

    def __init__(self, keeper: EngineKeeper, role: NodeRole, room: PageRoom) -> None:
        self._keeper = keeper
        self._role = role
        self._room = room
        self.draining = False

    @property
    def accepting(self) -> bool:
        """Whether gateways should send jobs."""
        return self._keeper.engine is not None and not self.leaving

    @property
    def leaving(self) -> str:
        """Why no new job should be sent: draining, converting; "" where jobs are welcome."""
        return "draining" if self.draining else "converting" if self._role.changing else ""

    @property
    def refusing(self) -> bool:
        """Whether no new job is taken; gateways that could not have known yet are not refused."""
        return self.draining or self._role.refusing

    @property
    def detail(self) -> str:
        """What keeps this node itself from taking or beginning work; "" where nothing does."""
        if self.leaving:
            return self.leaving
        waiting = self._room.waiting
        full = f"pool full: {waiting} {'transfer waits' if waiting == 1 else 'transfers wait'} for pages"
        return self._keeper.detail or (full if waiting else "")
