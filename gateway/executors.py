"""How a node is told to change: our own over its control stream; engines and orchestrators by executors beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.sessions import NodeLost, NodeSession
from kvcache.control import ChangeRole, RoleChanged
from kvcache.wire import Role

SETTLE_S = 5.0
"""How long a drained node may take for the last bytes of its transfers."""


class ConversionFailed(Exception):
    """A step did not work. ``cause`` is a short word, the text says what happened."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Order:
    """What is to become of a node, and under which epoch."""

    node: NodeSession
    role: Role
    epoch: int


class RoleExecutor(Protocol):
    """Makes one thing play a role. Asked again with the old role to undo it."""

    async def change(self, order: Order) -> None:
        """Return when it does. Raises ConversionFailed; the caller bounds the time."""


class OwnNodes:
    """Orders our nodes, whose both sides are there already, and takes their answers."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], asyncio.Future[RoleChanged]] = {}

    async def change(self, order: Order) -> None:
        """Send ChangeRole and wait for its answer."""
        node = order.node
        if not node.join.converts:
            raise ConversionFailed("unsupported", f"{node.node_id} is too old to change its role; restart it instead")
        key = (node.node_id, order.epoch)
        answer: asyncio.Future[RoleChanged] = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        try:
            node.send(ChangeRole(order.role, order.epoch, node.incarnation, SETTLE_S))
            said = await answer
        except NodeLost as lost:
            raise ConversionFailed("node_lost", f"{node.node_id} left: {lost}") from lost
        finally:
            del self._waiting[key]
        if not said.changed:
            raise ConversionFailed("refused", f"{node.node_id}: {said.cause[:40]}: {said.detail[:200]}")
        if said.role is not order.role:
            raise ConversionFailed("refused", f"{node.node_id} says that it plays {said.role.name.lower()}")

    def answered(self, node: NodeSession, message: RoleChanged) -> None:
        """A node's answer, and with it the role that it plays; what nobody waits for, or no more, changes nothing."""
        waiting = self._waiting.get((node.node_id, message.epoch))
        if waiting is not None and not waiting.done():
            node.plays(message.role, message.epoch)
            waiting.set_result(message)


class Executors:
    """Which executors change a node: our own first, then those that an operator named for it."""

    def __init__(self, own: OwnNodes, others: Mapping[str, Sequence[RoleExecutor]] | None = None) -> None:
        self._own = own
        self._others = dict(others or {})

    def of(self, node_id: str) -> tuple[RoleExecutor, ...]:
        """In the order in which they act."""
        return (self._own, *self._others.get(node_id, ()))
