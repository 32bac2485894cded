"""``prfaas tenants``: the weight of a tenant's work, and what all its keys together may use."""

from __future__ import annotations

from urllib.parse import quote

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table
from gateway.commands.inputs import Finite
from gateway.commands.rates import rate_options, rates_text


@click.group()
def tenants() -> None:
    """Say what tenants may use, and how much their work weighs."""


@tenants.command("set")
@click.argument("name")
@click.option(
    "--weight",
    type=Finite(0, min_open=True),
    default=1.0,
    show_default=True,
    help="In a full queue it gets work in proportion to this.",
)
@rate_options
@gateway_options
def set_terms(
    api: Api,
    as_json: bool,
    name: str,
    weight: float,
    rate: int | None,
    tokens_per_minute: int | None,
    concurrency: int | None,
) -> None:
    """Say anew what holds for tenant NAME, as its keys name it; what is not given has no limit."""
    body = {"weight": weight, "requests_per_minute": rate, "tokens_per_minute": tokens_per_minute}
    done = api.call("PUT", f"/v1/tenants/{quote(name, safe='')}", body | {"concurrency": concurrency})
    if as_json:
        print_json(done)
    else:
        click.echo(f"tenant {name}: weight {done['weight']:g}, limits: {rates_text(done)}")


@tenants.command("list")
@gateway_options
def list_tenants(api: Api, as_json: bool) -> None:
    """Tenants that something was said of."""
    found = api.call("GET", "/v1/tenants")
    if as_json:
        print_json(found)
        return
    rows = [(one["name"], f"{one['weight']:g}", rates_text(one)) for one in found["tenants"]]
    print_table(("tenant", "weight", "limits"), rows, "nothing is said of any tenant: all weigh 1 and have no limits")


@tenants.command("unset")
@click.argument("name")
@gateway_options
def unset(api: Api, as_json: bool, name: str) -> None:
    """Forget what was said of tenant NAME: weight 1, no limits."""
    done = api.call("DELETE", f"/v1/tenants/{quote(name, safe='')}")
    if as_json:
        print_json(done)
    else:
        click.echo(f"tenant {name} weighs 1 and has no limits")
