"""What keys have used of their whole budgets of tokens: counted as answers end, kept in the state a second later.

Gateways over one state file add up; each learns what the others counted whenever it writes.
"""

from __future__ import annotations

import asyncio
import logging

from gateway.errors import ApiError
from gateway.keys import Principal
from gateway.state import State

log = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
_READ = "SELECT value FROM counters WHERE name = ?"
_ADD = (
    "INSERT INTO counters (name, value) VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value RETURNING value"
)


class Budgets:
    """Of keys that have one. A request that begins while something is left may use more than that."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._known: dict[str, int] = {}
        self._unwritten: dict[str, int] = {}
        self._due: asyncio.TimerHandle | None = None

    def spent(self, key_id: str) -> int:
        """Tokens of prompts and answers so far. Raises ApiError where the state cannot be read."""
        if key_id not in self._known:
            rows = self._state.execute(_READ, (_name(key_id),))
            self._known[key_id] = rows[0][0] if rows else 0
        return self._known[key_id] + self._unwritten.get(key_id, 0)

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
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._write)

    def forget(self, key_id: str) -> None:
        """Its key is gone, or begins anew."""
        self._known.pop(key_id, None)
        self._unwritten.pop(key_id, None)
        self._state.execute("DELETE FROM counters WHERE name = ?", (_name(key_id),))

    def close(self) -> None:
        """Write what is not written. Idempotent."""
        if self._due is not None:
            self._due.cancel()
        self._write()

    def _write(self) -> None:
        self._due = None
        for key_id, tokens in list(self._unwritten.items()):
            try:
                self._known[key_id] = self._state.execute(_ADD, (_name(key_id), tokens))[0][0]
            except ApiError as error:
                log.warning("budgets not written cause=%r", str(error))
                return
            del self._unwritten[key_id]


def _name(key_id: str) -> str:
    return f"budget:{key_id}"
