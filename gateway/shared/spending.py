"""What keys have used of their whole budgets of tokens, over all gateways: totals that lie in Redis.

A total only rises while its key lives. Whoever adds to it says what total it knows, so a Redis that was emptied is back
where the gateway was that knew most.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gateway.shared.link import RedisLink
from gateway.shared.scripts import SPEND

SEEN_S = 24 * 3600
"""How long it is remembered what a gateway said last."""


class Spending:
    """Called in the background, and by requests that do not wait for it for long."""

    def __init__(self, link: RedisLink, me: str) -> None:
        self._link = link
        self._me = me

    @property
    def up(self) -> bool:
        """Whether it makes sense to ask."""
        return self._link.up

    async def exchange(self, number: int, told: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """Of each key the total that is known here and what is to be added to it, in tokens; the totals of now.

        Raises RedisAway. Then whether anything was added is not known: to be said again under the same ``number``,
        which adds nothing twice. Numbers rise.
        """
        values: list[str | int] = [number, SEEN_S]
        for key_id, (known, more) in told.items():
            values += [key_id, known, more]
        keys = [self._link.key("spent"), self._link.key("spent-by", self._me)]
        found = await self._link.script(SPEND, keys, values)
        return {key_id: int(total) for key_id, total in zip(told, found, strict=True)}

    async def forget(self, key_ids: Collection[str]) -> None:
        """These keys are gone. Raises RedisAway."""
        await self._link.command("HDEL", self._link.key("spent"), *key_ids)
