"""Which role this node plays, and changing it on order without a restart: both sides are always there.

A role changes only when nothing is at hand any more, and only on an order of a higher epoch than the last one obeyed
and for this very incarnation: an order that was delayed, or comes from a gateway that is no longer the leader, changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvcache.control import ChangeRole, RoleChanged
from kvcache.wire import Role

log = logging.getLogger(__name__)


class NodeRole:
    """``role`` now, ``epoch`` of the order that made it so (0 for the role it was started in).

    ``settled`` returns when no job is at hand; ``answer`` takes the outcome of each order; ``on_change`` is called
    whenever ``changing`` has become another.
    """

    def __init__(
        self,
        role: Role,
        incarnation: str,
        settled: Callable[[], Awaitable[None]],
        answer: Callable[[RoleChanged], None],
        on_change: Callable[[], None],
    ) -> None:
        self.role = role
        self.epoch = 0
        self._incarnation = incarnation
        self._settled = settled
        self._answer = answer
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None

    @property
    def changing(self) -> bool:
        """Whether an order waits for the jobs at hand; none are taken meanwhile."""
        return self._task is not None

    def order(self, order: ChangeRole) -> None:
        """Obey an order, or say why not. One that waits still gives way to one of a higher epoch."""
        if order.incarnation != self._incarnation:
            self._refuse(order, "incarnation", f"for incarnation {order.incarnation!r}, which this process is not")
        elif order.epoch <= self.epoch:
            self._refuse(order, "stale_epoch", f"epoch {order.epoch} came after {self.epoch} was obeyed")
        else:
            self.cancel()
            self.epoch = order.epoch
            self._task = asyncio.create_task(self._change(order))
            self._on_change()

    def cancel(self) -> None:
        """Give up an order that waits still: who gave it is gone, or has changed its mind."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._on_change()

    async def _change(self, order: ChangeRole) -> None:
        try:
            async with asyncio.timeout(order.settle_s):
                await self._settled()
        except TimeoutError:
            self._task = None
            self._refuse(order, "busy", f"jobs are still at hand after {order.settle_s:g} s")
        else:
            log.info("role changed to=%s epoch=%d", order.role.name.lower(), order.epoch)
            self.role, self._task = order.role, None
            self._answer(RoleChanged(order.epoch, self.role, True))
        self._on_change()

    def _refuse(self, order: ChangeRole, cause: str, detail: str) -> None:
        log.warning("role order refused epoch=%d cause=%s detail=%r", order.epoch, cause, detail)
        self._answer(RoleChanged(order.epoch, self.role, False, cause, detail))
