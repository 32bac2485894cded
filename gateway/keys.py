"""API keys: kept hashed, each with a role and what it permits."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.errors import ApiError
from gateway.state import OutsideChanges, State
from gateway.terms import KeyLimits

PREFIX = "prfaas-"
STRONG = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{43,128}")
NO_LIMITS = KeyLimits()


class Role(StrEnum):
    """What a caller may do; ``admin`` may do everything."""

    CLIENT = "client"
    OPERATOR = "operator"
    PLANNER = "planner"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. ``clusters`` None permits every remote cluster; the local one decodes and is permitted.

    ``tenant`` is within whom caches are reused: "" with all others that have "".
    """

    name: str
    role: Role
    route_hint: bool
    clusters: frozenset[str] | None = None
    limits: KeyLimits = NO_LIMITS
    tenant: str = ""
    key_id: str = ""

    @property
    def account(self) -> str:
        """Whose work it is: of a tenant by its name, else of this key alone, also where caches are shared."""
        return self.limits.tenant or f"key:{self.key_id}"

    def may_use(self, model: str) -> bool:
        """Whether this caller may name a model."""
        return self.limits.models is None or model in self.limits.models

    def expired(self, now: float) -> bool:
        """Whether its key is worth nothing at this Unix time."""
        return self.limits.expires is not None and now >= self.limits.expires

    def may(self, *roles: Role) -> bool:
        """Whether this caller has one of the roles, or is admin."""
        return self.role is Role.ADMIN or self.role in roles


def new_secret() -> str:
    """The secret of a key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


LOOPBACK_ADMIN = Principal("loopback", Role.ADMIN, route_hint=True)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key as an admin sees it: never its secret."""

    id: str
    principal: Principal
    created: float


class KeyBook:
    """The keys of one state, cached; changes that another process makes to the file are noticed within a second.

    Secrets have 256 random bits, so a plain SHA-256 is a sufficient hash and an index lookup leaks nothing of use.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._outside = OutsideChanges(state)
        self._by_digest: dict[bytes, KeyEntry] = {}
        self._refresh()

    def __len__(self) -> int:
        self._refresh()
        return len(self._by_digest)

    def entries(self) -> list[KeyEntry]:
        """All keys, oldest first."""
        self._refresh()
        return sorted(self._by_digest.values(), key=lambda entry: entry.created)

    def find(self, secret: str) -> Principal | None:
        """Who holds this secret, or None."""
        self._refresh()
        entry = self._by_digest.get(_digest(secret))
        return entry.principal if entry else None

    def create(
        self,
        name: str,
        role: Role,
        route_hint: bool = False,
        clusters: frozenset[str] | None = None,
        limits: KeyLimits = NO_LIMITS,
    ) -> tuple[str, str]:
        """Make a key; returns its id and its secret, which is shown this once. Raises ApiError 400."""
        limits.check()
        key_id, secret = secrets.token_hex(4), new_secret()
        listed = None if clusters is None else json.dumps(sorted(clusters))
        self._state.execute(
            "INSERT INTO keys (id, name, role, digest, route_hint, clusters, created, limits) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (key_id, name, role.value, _digest(secret), int(route_hint), listed, time.time(), _kept(limits)),
        )
        self.reload()
        return key_id, secret

    def ensure_admin(self, secret: str) -> None:
        """Have an admin's key of this secret, however often it is asked for. Raises ApiError 400 for a weak one."""
        if not STRONG.fullmatch(secret):
            raise ApiError(
                400,
                "a key is `prfaas-` and 43 letters, digits, dashes or underscores, as made by `prfaas keys generate`",
            )
        digest = _digest(secret)
        if digest in self._by_digest:
            return
        # By the digest, so that gateways which share their keys make the same row.
        self._state.execute(
            "INSERT OR IGNORE INTO keys (id, name, role, digest, route_hint, created) VALUES (?, ?, ?, ?, 1, ?)",
            (digest.hex()[:8], "admin key file", Role.ADMIN.value, digest, time.time()),
        )
        self.reload()

    def change(
        self, key_id: str, name: str, route_hint: bool, clusters: frozenset[str] | None, limits: KeyLimits
    ) -> None:
        """Say anew what a key permits; nothing happens where there is none of this id. Raises ApiError 400."""
        limits.check()
        listed = None if clusters is None else json.dumps(sorted(clusters))
        self._state.execute(
            "UPDATE keys SET name = ?, route_hint = ?, clusters = ?, limits = ? WHERE id = ?",
            (name, int(route_hint), listed, _kept(limits), key_id),
        )
        self.reload()

    def revoke(self, key_id: str) -> bool:
        """Delete a key; False where there is none of this id."""
        found = self._state.execute("DELETE FROM keys WHERE id = ? RETURNING id", (key_id,))
        self.reload()
        return bool(found)

    def reload(self) -> None:
        """Take what the state holds now."""
        with self._state.reading("keys"):
            rows = self._state.execute("SELECT digest, id, name, role, route_hint, clusters, created, limits FROM keys")
            self._by_digest = {digest: _entry(*rest) for digest, *rest in rows}

    def _refresh(self) -> None:
        if self._outside.changed():
            self.reload()


def _entry(
    key_id: str, name: str, role: str, route_hint: int, clusters: str | None, created: float, kept: str | None
) -> KeyEntry:
    permitted = None if clusters is None else frozenset(json.loads(clusters))
    limits = NO_LIMITS if kept is None else msgspec.json.decode(kept, type=KeyLimits)
    tenant = "" if limits.share_cache else limits.tenant or f"key:{key_id}"
    return KeyEntry(key_id, Principal(name, Role(role), bool(route_hint), permitted, limits, tenant, key_id), created)


def _kept(limits: KeyLimits) -> str:
    return msgspec.json.encode(limits, order="deterministic").decode()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
