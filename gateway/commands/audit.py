"""``prfaas audit``: who changed what, and which nodes were turned away."""

from __future__ import annotations

import time

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table


@click.command()
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many of the newest.")
@gateway_options
def audit(api: Api, as_json: bool, limit: int) -> None:
    """The newest changes that operators made, with what was answered, and nodes that were turned away."""
    found = api.call("GET", f"/v1/audit?limit={limit}")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry["time"])),
            entry["actor"],
            entry["action"],
            entry["cluster"],
            entry["outcome"],
            entry["detail"],
        )
        for entry in found["entries"]
    ]
    print_table(("time (UTC)", "who", "what", "cluster", "outcome", "why"), rows, "nothing was changed yet")
