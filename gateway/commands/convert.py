"""``prfaas nodes convert``: change a node's role and see it through."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import click

from gateway.commands.client import Api, gateway_options, print_json
from gateway.commands.inputs import Finite

POLL_S = 0.5
_GOOD = "done"


@click.command("convert")
@click.argument("node")
@click.option(
    "--to", "role", type=click.Choice(["prefill", "decode"]), required=True, help="The role that it is to play."
)
@click.option("--reason", default="asked for by an operator", show_default=True, help="Kept with the conversion.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Stay until it has ended.")
@click.option("--timeout", type=Finite(0, min_open=True), default=900.0, show_default=True, help="Seconds.")
@gateway_options
def convert(api: Api, as_json: bool, node: str, role: str, reason: str, wait: bool, timeout: float) -> None:
    """Drain NODE, change its role, prove it by real work, and route to it again; or put it back."""
    record = api.call("POST", f"/v1/nodes/{quote(node, safe='')}/role", {"role": role, "reason": reason})
    deadline = time.monotonic() + timeout
    while wait and record["ended"] is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        record = api.call("GET", f"/v1/conversions/{record['id']}")
    if as_json:
        print_json(record)
    else:
        _say(record)
    if wait and record["phase"] != _GOOD:
        raise click.exceptions.Exit(1)


def _say(record: dict[str, Any]) -> None:
    what = f"{record['node_id']} from {record['role_from']} to {record['role_to']}"
    if record["ended"] is None:
        click.echo(f"converting {what}: {record['phase']} (conversion {record['id']})")
        return
    seconds = record["ended"] - record["began"]
    word = {"done": "converted", "rolled_back": "put back"}.get(record["phase"], record["phase"])
    click.echo(f"{word}: {what}, after {seconds:.1f} s" + (f"; {record['detail']}" if record["detail"] else ""))
