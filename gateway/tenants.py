"""What operators say of tenants: the weight of their work, and what all their keys together may use."""

from __future__ import annotations

import msgspec

from gateway.state import OutsideChanges, State
from gateway.terms import TenantTerms, check_name

NO_TERMS = TenantTerms()


class Tenants:
    """Terms by tenant, kept in the state and cached; another process's changes are noticed within a second."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._outside = OutsideChanges(state)
        self._terms: dict[str, TenantTerms] = {}
        self._refresh()

    def of(self, name: str) -> TenantTerms:
        """The terms of a tenant; of one that nobody spoke of, weight 1 and no limits."""
        self._refresh()
        return self._terms.get(name, NO_TERMS)

    def all(self) -> dict[str, TenantTerms]:
        """Those that were set, by name."""
        self._refresh()
        return dict(sorted(self._terms.items()))

    def set(self, name: str, terms: TenantTerms) -> None:
        """Say anew what holds for a tenant. Raises ApiError 400."""
        check_name("tenant", name)
        terms.check()
        kept = msgspec.json.encode(terms, order="deterministic").decode()
        self._state.execute("INSERT OR REPLACE INTO tenants (name, terms) VALUES (?, ?)", (name, kept))
        self.reload()

    def remove(self, name: str) -> bool:
        """Forget what was said; False where there was nothing."""
        found = self._state.execute("DELETE FROM tenants WHERE name = ? RETURNING name", (name,))
        self.reload()
        return bool(found)

    def reload(self) -> None:
        """Take what the state holds now."""
        with self._state.reading("tenants"):
            rows = self._state.execute("SELECT name, terms FROM tenants")
            self._terms = {name: msgspec.json.decode(kept, type=TenantTerms) for name, kept in rows}

    def _refresh(self) -> None:
        if self._outside.changed():
            self.reload()
