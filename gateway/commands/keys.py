"""``prfaas keys``: over the API of a running gateway, or straight in the state file of one that has no key yet."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from gateway.commands.client import Api, gateway_options, print_json, print_table
from gateway.commands.rates import rate_options, rates_text
from gateway.config import ConfigError
from gateway.errors import ApiError
from gateway.keys import KeyBook, Role
from gateway.state import State
from gateway.terms import KeyLimits

_STATE = click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Work on this state file instead of asking a gateway.",
)


@click.group()
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command("create")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True)
@click.option("--name", default="", help="A label for people.")
@click.option("--route-hint", is_flag=True, help="Let its holder choose where prompts are prefilled.")
@click.option("--cluster", "clusters", multiple=True, help="Permit only these remote clusters; may be repeated.")
@click.option("--not-cluster", "barred", multiple=True, help="Its prompts may not reach this cluster; may be repeated.")
@click.option("--region", "regions", multiple=True, help="Its prompts may be in these regions only; may be repeated.")
@click.option("--trusted-only", is_flag=True, help="Its prompts reach only remote clusters that are marked trusted.")
@click.option("--tenant", help="Whose it is: caches are reused within a tenant.  [default: of its own]")
@click.option(
    "--share-cache", is_flag=True, help="Reuse caches with all other keys that say so; implies --trusted-only."
)
@rate_options
@_STATE
@gateway_options
def create(
    api: Api,
    as_json: bool,
    role: str,
    name: str,
    route_hint: bool,
    clusters: tuple[str, ...],
    barred: tuple[str, ...],
    regions: tuple[str, ...],
    trusted_only: bool,
    tenant: str | None,
    share_cache: bool,
    rate: int | None,
    tokens_per_minute: int | None,
    concurrency: int | None,
    state: Path | None,
) -> None:
    """Make a key and print it: this is the only time that it can be seen."""
    rates = (rate, tokens_per_minute, concurrency)
    limits = KeyLimits(tenant, share_cache, frozenset(regions) or None, frozenset(barred), trusted_only, *rates)
    if state is None:
        body = {"role": role, "name": name, "route_hint": route_hint, "clusters": list(clusters) or None}
        made = api.call("POST", "/v1/keys", body | msgspec.to_builtins(limits, order="deterministic"))
    else:
        made = _create_in(state, Role(role), name, route_hint, frozenset(clusters) or None, limits)
    if as_json:
        print_json(made)
    else:
        click.echo(made["key"])


@keys.command("list")
@gateway_options
def list_keys(api: Api, as_json: bool) -> None:
    """All keys, without their secrets."""
    found = api.call("GET", "/v1/keys")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["id"],
            one["name"],
            one["role"],
            "yes" if one["route_hint"] else "no",
            ", ".join(one["clusters"] or ()) or "all",
            one["tenant"] or ("shared" if one["share_cache"] else None),
            _where(one),
            rates_text(one),
        )
        for one in found["keys"]
    ]
    print_table(
        ("id", "name", "role", "route hints", "clusters", "tenant", "prompts may be", "limits"),
        rows,
        "no keys: only this machine may call",
    )


@keys.command("revoke")
@click.argument("key_id")
@gateway_options
def revoke(api: Api, as_json: bool, key_id: str) -> None:
    """Make a key worthless at once."""
    done = api.call("DELETE", f"/v1/keys/{quote(key_id, safe='')}")
    if as_json:
        print_json(done)
    else:
        click.echo(f"key {key_id} is revoked")


def _where(key: dict[str, Any]) -> str:
    parts = [f"in {', '.join(key['regions'])}"] if key["regions"] is not None else []
    if key["barred"]:
        parts.append(f"not in {', '.join(key['barred'])}")
    if key["trusted_only"]:
        parts.append("where trusted")
    return "; ".join(parts) or "anywhere"


def _create_in(
    file: Path, role: Role, name: str, route_hint: bool, clusters: frozenset[str] | None, limits: KeyLimits
) -> dict[str, Any]:
    try:
        with closing(State(file)) as state:
            book = KeyBook(state)
            if not len(book) and role is not Role.ADMIN:
                raise click.ClickException("--role: the first key must be admin, or nobody could make or revoke keys")
            key_id, secret = book.create(name, role, route_hint, clusters, limits)
    except (ApiError, ConfigError) as error:
        raise click.ClickException(str(error)) from error
    return {"id": key_id, "key": secret, "role": role.value}
