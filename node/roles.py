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

    ``settled`` returns when no job is at hand; ``answer`` takes who gave an order and its outcome; ``on_change`` is
    called whenever ``changing`` has become another. ``noticed`` returns when every gateway has had the time to hear
    that: until then jobs that were on their way are still taken.
    """

    def __init__(
        self,
        role: Role,
        incarnation: str,
        settled: Callable[[], Awaitable[None]],
        answer: Callable[[str, RoleChanged], None],
        on_change: Callable[[], None],
        noticed: Callable[[], Awaitable[None]],
    ) -> None:
        self.role = role
        self.epoch = 0
        self._incarnation = incarnation
        self._settled = settled
        self._answer = answer
        self._on_change = on_change
        self._noticed = noticed
        self._task: asyncio.Task[None] | None = None
        self._orderer = ""
        self._closed = False

    @property
    def changing(self) -> bool:
        """Whether an order waits for the jobs at hand; no gateway should send any meanwhile."""
        return self._task is not None

    @property
    def refusing(self) -> bool:
        """Whether jobs are not taken because of that."""
        return self._task is not None and self._closed

    def order(self, order: ChangeRole, gateway: str = "") -> None:
        """Obey a gateway's order, or say why not. One that waits still gives way to one of a higher epoch."""
        if order.incarnation != self._incarnation:
            detail = f"for incarnation {order.incarnation!r}, which this process is not"
            self._refuse(order, gateway, "incarnation", detail)
        elif order.epoch <= self.epoch:
            self._refuse(order, gateway, "stale_epoch", f"epoch {order.epoch} came after {self.epoch} was obeyed")
        else:
            self.cancel()
            self.epoch, self._orderer, self._closed = order.epoch, gateway, False
            self._task = asyncio.create_task(self._change(order, gateway))
            self._on_change()

    def cancel(self) -> None:
        """Give up an order that waits still: who gave it has changed its mind, or nobody asks any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._on_change()

    def lost(self, gateway: str) -> None:
        """A gateway is gone, and with it its order if that waits still."""
        if self._orderer == gateway:
            self.cancel()

    async def _change(self, order: ChangeRole, gateway: str) -> None:
        try:
            async with asyncio.timeout(order.settle_s):
                await self._noticed()
                self._closed = True
                await self._settled()
        except TimeoutError:
            self._task = None
            self._refuse(order, gateway, "busy", f"jobs are still at hand after {order.settle_s:g} s")
        else:
            log.info("role changed to=%s epoch=%d", order.role.name.lower(), order.epoch)
            self.role, self._task = order.role, None
            self._answer(gateway, RoleChanged(order.epoch, self.role, True))
        self._on_change()

    def _refuse(self, order: ChangeRole, gateway: str, cause: str, detail: str) -> None:
        log.warning("role order refused epoch=%d cause=%s detail=%r", order.epoch, cause, detail)
        self._answer(gateway, RoleChanged(order.epoch, self.role, False, cause, detail))
