"""``prfaas reload``: have a running gateway read its configuration file and its certificate again."""

from __future__ import annotations

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table


@click.command("reload")
@gateway_options
def reload_gateway(api: Api, as_json: bool) -> None:
    """Read the gateway's --config file and its certificate again; says what changed, or why nothing was."""
    found = api.call("POST", "/v1/reload")
    if as_json:
        print_json(found)
        return
    rows = [(one["option"], one["was"], one["now"]) for one in found["changed"]]
    print_table(("option", "was", "now"), rows, "nothing has changed")
