"""``/v1/keys``: who may call, what each may use, until when. Secrets are shown once, when they are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from gateway.answers import json_answer, needs
from gateway.budgets import Budgets
from gateway.errors import ApiError, bad_field
from gateway.keys import KeyBook, KeyEntry, Role
from gateway.terms import KeyLimits
from gateway.views import key_view

BodyOf = Callable[[Request, type[Any]], Awaitable[Any]]
_LIMITS = KeyLimits.__struct_fields__


class KeyBody(KeyLimits, frozen=True, kw_only=True):
    """A key to create, with its limits; ``clusters`` None permits all."""

    role: Role
    name: str = ""
    route_hint: bool = False
    clusters: frozenset[str] | None = None

    @property
    def limits(self) -> KeyLimits:
        """Those among the fields."""
        return KeyLimits(**{field: getattr(self, field) for field in _LIMITS})


class KeyChange(msgspec.Struct, frozen=True):
    """What is to be different of a key; null lifts a limit, what is left out stays."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    route_hint: bool | msgspec.UnsetType = msgspec.UNSET
    clusters: frozenset[str] | msgspec.UnsetType | None = msgspec.UNSET
    tenant: str | msgspec.UnsetType | None = msgspec.UNSET
    share_cache: bool | msgspec.UnsetType = msgspec.UNSET
    regions: frozenset[str] | msgspec.UnsetType | None = msgspec.UNSET
    barred: frozenset[str] | msgspec.UnsetType = msgspec.UNSET
    trusted_only: bool | msgspec.UnsetType = msgspec.UNSET
    requests_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    concurrency: int | msgspec.UnsetType | None = msgspec.UNSET
    models: frozenset[str] | msgspec.UnsetType | None = msgspec.UNSET
    expires: float | msgspec.UnsetType | None = msgspec.UNSET
    token_budget: int | msgspec.UnsetType | None = msgspec.UNSET


class KeyMade(msgspec.Struct, frozen=True):
    """``key`` is the secret."""

    id: str
    key: str
    role: Role


class KeyRevoked(msgspec.Struct, frozen=True):
    """It is worth nothing any more."""

    id: str
    revoked: bool


def add_key_routes(api: FastAPI, keys: KeyBook, budgets: Budgets, body_of: BodyOf) -> None:
    """Add them, for admins."""
    admins = [needs(Role.ADMIN)]

    def seen(entry: KeyEntry) -> dict[str, Any]:
        used = None if entry.principal.limits.token_budget is None else budgets.spent(entry.id)
        return key_view(entry) | {"tokens_used": used}

    def found(key_id: str) -> KeyEntry:
        entry = next((entry for entry in keys.entries() if entry.id == key_id), None)
        if entry is None:
            raise ApiError(404, f"no key has id {key_id!r}", code="key_not_found")
        return entry

    @api.get("/v1/keys", dependencies=admins)
    async def list_keys() -> Response:
        listed = keys.entries()
        await budgets.hear([one.id for one in listed if one.principal.limits.token_budget is not None])
        return json_answer({"keys": [seen(entry) for entry in listed]})

    @api.post("/v1/keys", dependencies=admins)
    async def create_key(request: Request) -> Response:
        body: KeyBody = await body_of(request, KeyBody)
        if not len(keys) and body.role is not Role.ADMIN:
            raise bad_field("role", "the first key must have role admin, or nobody could make or revoke keys")
        key_id, secret = keys.create(body.name, body.role, body.route_hint, body.clusters, body.limits)
        return json_answer(KeyMade(key_id, secret, body.role), 201)

    @api.get("/v1/keys/{key_id}", dependencies=admins)
    async def one_key(key_id: str) -> Response:
        entry = found(key_id)
        await budgets.hear([key_id])
        return json_answer(seen(entry))

    @api.patch("/v1/keys/{key_id}", dependencies=admins)
    async def change_key(key_id: str, request: Request) -> Response:
        """What is given is in force at once. Role and secret stay."""
        body: KeyChange = await body_of(request, KeyChange)
        before = found(key_id).principal
        given = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not msgspec.UNSET}
        if not given:
            raise bad_field("", "nothing to change: give a field of the key that is to be different")
        limits = msgspec.structs.replace(before.limits, **{name: given[name] for name in _LIMITS if name in given})
        keys.change(
            key_id,
            given.get("name", before.name),
            given.get("route_hint", before.route_hint),
            given.get("clusters", before.clusters),
            limits,
        )
        return json_answer(seen(found(key_id)))

    @api.delete("/v1/keys/{key_id}", dependencies=admins)
    async def revoke_key(key_id: str) -> Response:
        if not keys.revoke(key_id):
            raise ApiError(404, f"no key has id {key_id!r}", code="key_not_found")
        budgets.forget(key_id)
        return json_answer(KeyRevoked(key_id, True))
