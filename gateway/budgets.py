"""What keys have used of their whole budgets of tokens: counted as answers end, kept in the state a second later.

Gateways over one state file add up there, and each learns what the others counted whenever it writes. Gateways that
share a Redis add up in it, four times a second; a request of a key that was quiet here first hears, for a tenth of a
second at most, what was used of it elsewhere. While Redis is away each counts on by itself, and tells afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from itertools import islice

from gateway.errors import ApiError
from gateway.keys import Principal
from gateway.shared.link import RedisAway
from gateway.shared.spending import Spending
from gateway.state import State

log = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
TELL_EVERY_S = 0.25
FRESH_S = 0.25
"""For so long what other gateways said is taken for what they would say."""
ASK_S = 0.1
"""How long a request may wait to hear it."""
AT_ONCE = 256
_PREFIX = "budget:"
_READ = "SELECT value FROM counters WHERE name = ?"
_ALL = "SELECT name FROM counters WHERE name LIKE 'budget:%'"
_ADD = (
    "INSERT INTO counters (name, value) VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value RETURNING value"
)
_RAISE = (
    "INSERT INTO counters (name, value) VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)"
)


class Budgets:
    """Of keys that have one. A request that begins while something is left may use more than that.

    ``spending`` is where several gateways add up; None where the state file is that.
    """

    def __init__(self, state: State, spending: Spending | None = None) -> None:
        self._state = state
        self._spending = spending
        self._known: dict[str, int] = {}
        self._unwritten: dict[str, int] = {}
        self._due: asyncio.TimerHandle | None = None
        self._raised: set[str] = set()
        self._written_at = float("-inf")
        self._heard_at: dict[str, float] = {}
        self._asking: set[str] = set()
        self._gone: set[str] = set()
        self._exchange: asyncio.Task[None] | None = None
        self._unsure: dict[str, int] = {}
        self._number = 0

    def spent(self, key_id: str) -> int:
        """Tokens of prompts and answers so far. Raises ApiError where the state cannot be read."""
        if key_id not in self._known:
            rows = self._state.execute(_READ, (_name(key_id),))
            self._known[key_id] = rows[0][0] if rows else 0
        return self._known[key_id] + self._unwritten.get(key_id, 0)

    async def prepare(self, principal: Principal) -> None:
        """Before ``check``: hear what was used at other gateways. Returns at once where that was just heard."""
        if principal.limits.token_budget is not None:
            await self.hear((principal.key_id,))

    async def hear(self, key_ids: Collection[str]) -> None:
        """What other gateways counted of these keys is known then, if Redis says so soon."""
        if self._spending is None or not self._spending.up:
            return
        now = asyncio.get_running_loop().time()
        stale = [one for one in key_ids if now - self._heard_at.get(one, float("-inf")) > FRESH_S]
        if stale:
            await asyncio.wait({self._ask(stale)}, timeout=ASK_S)

    def check(self, principal: Principal) -> None:
        """Raise ApiError 429 where a key's budget is used up: waiting does not help."""
        budget = principal.limits.token_budget
        if budget is not None and (spent := self.spent(principal.key_id)) >= budget:
            raise ApiError(
                429,
                f"this key has used {spent} tokens of its budget of {budget} (token_budget); have the budget raised",
                code="insufficient_quota",
            )

    def spend(self, principal: Principal, tokens: int) -> None:
        """A request is over."""
        if principal.limits.token_budget is None or not tokens:
            return
        key_id = principal.key_id
        self._unwritten[key_id] = self._unwritten.get(key_id, 0) + tokens
        self._soon()

    def forget(self, key_id: str) -> None:
        """Its key is gone, or begins anew. Where it may be refused yet that it goes, ``keep_only`` follows instead."""
        if self._spending is None:
            self._forget(key_id)

    def keep_only(self, key_ids: Collection[str]) -> None:
        """These are all keys that there are, and that holds on every gateway."""
        try:
            kept = {row[0].removeprefix(_PREFIX) for row in self._state.execute(_ALL)}
            for key_id in (kept | set(self._known)) - set(key_ids):
                self._forget(key_id)
        except ApiError as error:
            log.warning("budgets of keys that are gone stay cause=%r", str(error))

    async def stop(self) -> None:
        """Tell the other gateways what they have not been told, if Redis takes it. Idempotent."""
        if self._spending is not None and (self._unwritten or self._unsure or self._gone):
            await self._ask(self._unwritten)

    def close(self) -> None:
        """Write what is not written. Idempotent."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._spending is None:
            self._write()
        else:
            self._raise()

    def _forget(self, key_id: str) -> None:
        for known in (self._known, self._unwritten, self._heard_at):
            known.pop(key_id, None)
        self._state.execute("DELETE FROM counters WHERE name = ?", (_name(key_id),))
        if self._spending is not None:
            self._gone.add(key_id)
            self._soon()

    def _soon(self) -> None:
        if self._due is None:
            every = WRITE_EVERY_S if self._spending is None else TELL_EVERY_S
            self._due = asyncio.get_running_loop().call_later(every, self._tick)

    def _tick(self) -> None:
        self._due = None
        if self._spending is None:
            self._write()
            return
        now = asyncio.get_running_loop().time()
        if now - self._written_at >= WRITE_EVERY_S:
            self._written_at = now
            self._raise()
        if self._spending.up and (self._unwritten or self._gone):
            self._ask(self._unwritten)
        if self._unwritten or self._gone or self._raised:
            self._soon()

    def _write(self) -> None:
        """Add to what the state has."""
        for key_id, tokens in list(self._unwritten.items()):
            try:
                self._known[key_id] = self._state.execute(_ADD, (_name(key_id), tokens))[0][0]
            except ApiError as error:
                log.warning("budgets not written cause=%r", str(error))
                return
            del self._unwritten[key_id]

    def _raise(self) -> None:
        """Have the state say what is known here of all gateways."""
        changed = self._raised | set(self._unwritten)
        try:
            self._state.execute_all(_RAISE, [(_name(key_id), self.spent(key_id)) for key_id in changed])
        except ApiError as error:
            log.warning("budgets not written cause=%r", str(error))
        else:
            self._raised.clear()

    # ---- with other gateways

    def _ask(self, key_ids: Collection[str]) -> asyncio.Task[None]:
        """Tell and hear of these, one exchange after the other; what is to be told of others goes along."""
        self._asking.update(key_ids)
        if self._exchange is None or self._exchange.done():
            self._exchange = asyncio.create_task(self._exchanged())
        return self._exchange

    async def _exchanged(self) -> None:
        assert self._spending is not None
        try:
            while self._asking or self._unsure:
                await self._exchanged_once(self._spending)
            if self._gone:
                gone = tuple(self._gone)
                await self._spending.forget(gone)
                self._gone.difference_update(gone)
        except RedisAway:
            self._asking.clear()  # what is to be told stays, and is told again
        except ApiError as error:
            log.warning("budgets not read cause=%r", str(error))

    async def _exchanged_once(self, spending: Spending) -> None:
        """Of so many as go at once; what may have been taken already is said again as it was."""
        if not self._unsure:
            batch = tuple(islice(self._asking, AT_ONCE))
            self._asking.difference_update(batch)
            self._unsure = {key_id: self._unwritten.get(key_id, 0) for key_id in batch}
            self._number += 1
        told = {one: (self.spent(one) - self._unwritten.get(one, 0), more) for one, more in self._unsure.items()}
        totals = await spending.exchange(self._number, told)
        now = asyncio.get_running_loop().time()
        for key_id, more in self._unsure.items():
            if key_id in self._gone:
                continue
            left = self._unwritten.pop(key_id, 0) - more
            if left > 0:
                self._unwritten[key_id] = left
            if self._known.get(key_id) != totals[key_id]:
                self._raised.add(key_id)
            self._known[key_id] = totals[key_id]
            self._heard_at[key_id] = now
        self._unsure = {}


def _name(key_id: str) -> str:
    return _PREFIX + key_id
