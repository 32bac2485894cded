"""``prfaas keys``: over the API of a running gateway, or straight in the state file of one that has no key yet."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from gateway.commands.client import Api, gateway_options, print_json, print_table
from gateway.commands.key_limits import LIFTED, changes, limit_options, limits_of, limits_text
from gateway.config import ConfigError
from gateway.errors import ApiError
from gateway.keys import KeyBook, Role, new_secret
from gateway.state import State
from gateway.terms import KeyLimits

_STATE = click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Work on this state file instead of asking a gateway.",
)


@click.group()
def keys() -> None:
    """Create, change, list and revoke API keys."""


@keys.command("create")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True)
@click.option("--name", default="", help="A label for people.")
@click.option("--route-hint", is_flag=True, help="Let its holder choose where prompts are prefilled.")
@click.option("--trusted-only", is_flag=True, help="Its prompts reach only remote clusters that are marked trusted.")
@click.option("--tenant", help="Whose it is: caches are reused within a tenant.  [default: of its own]")
@click.option(
    "--share-cache", is_flag=True, help="Reuse caches with all other keys that say so; implies --trusted-only."
)
@limit_options
@_STATE
@gateway_options
def create(
    api: Api,
    as_json: bool,
    role: str,
    name: str,
    route_hint: bool,
    trusted_only: bool,
    tenant: str | None,
    share_cache: bool,
    state: Path | None,
    **given: Any,
) -> None:
    """Make a key and print it: this is the only time that it can be seen."""
    clusters, limits = limits_of(given, tenant=tenant, share_cache=share_cache, trusted_only=trusted_only)
    if state is None:
        body = {"role": role, "name": name, "route_hint": route_hint, "clusters": sorted(clusters or ()) or None}
        made = api.call("POST", "/v1/keys", body | msgspec.to_builtins(limits, order="deterministic"))
    else:
        made = _create_in(state, Role(role), name, route_hint, clusters, limits)
    if as_json:
        print_json(made)
    else:
        click.echo(made["key"])


@keys.command("generate")
def generate() -> None:
    """Print a new secret that is nobody's key yet, for `prfaas gateway --admin-key-file`."""
    click.echo(new_secret())


@keys.command("set")
@click.argument("key_id")
@click.option("--name", help="A label for people.")
@click.option("--route-hint/--no-route-hint", default=None, help="Whether its holder may choose where to prefill.")
@click.option("--trusted-only/--not-trusted-only", default=None, help="Whether only trusted clusters see its prompts.")
@click.option(
    "--lift", "lifted", multiple=True, type=click.Choice(sorted(LIFTED)), help="Take this limit away; may be repeated."
)
@limit_options
@gateway_options
def set_limits(
    api: Api,
    as_json: bool,
    key_id: str,
    name: str | None,
    route_hint: bool | None,
    trusted_only: bool | None,
    lifted: tuple[str, ...],
    **given: Any,
) -> None:
    """Change what key KEY_ID permits; what is not given stays. Its role and its secret stay, too."""
    said = {"name": name, "route_hint": route_hint, "trusted_only": trusted_only}
    body = {field: value for field, value in said.items() if value is not None} | changes(given, lifted)
    if not body:
        raise click.UsageError("nothing to change: give an option of what is to be different")
    one = api.call("PATCH", f"/v1/keys/{quote(key_id, safe='')}", body)
    if as_json:
        print_json(one)
    else:
        click.echo(f"key {key_id}: clusters {', '.join(one['clusters'] or ()) or 'all'}, limits: {limits_text(one)}")


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
            limits_text(one),
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
