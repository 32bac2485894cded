"""``prfaas plan proposals``, ``approve`` and ``refuse``: what the long-term loop would change, and a person's word."""

from __future__ import annotations

import time
from typing import Any

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table


@click.command("proposals")
@gateway_options
def proposals(api: Api, as_json: bool) -> None:
    """What the gateway would change about the split, and what came of earlier proposals."""
    found = api.call("GET", "/v1/plans/proposals")
    if as_json:
        print_json(found)
        return
    look = found["assessment"]
    click.echo(f"mode {found['mode']}")
    if look is None:
        click.echo("too little traffic was seen to judge the split")
    else:
        now, best = _split(look["prefill_now"], look["counts"]), _split(look["prefill_best"], look["counts"])
        click.echo(
            f"now {now}: {look['lambda_now']:.3g} req/s of {look['rate']:.3g} offered, {look['bottleneck']} is full "
            f"first; best {best}: {look['lambda_best']:.3g} req/s"
        )
    click.echo()
    rows = [
        (
            one["number"],
            one["verdict"],
            _split(one["prefill_now"], _counts(one)),
            _split(one["prefill"], _counts(one)),
            f"{one['threshold']:.0f}",
            None if one["gain"] is None else f"{one['gain']:.2f}",
            one["reason"],
        )
        for one in found["proposals"]
    ]
    print_table(("number", "verdict", "from", "to", "t", "gain", "why"), rows, "no proposals")


@click.command("approve")
@click.argument("number", type=int)
@gateway_options
def approve(api: Api, as_json: bool, number: int) -> None:
    """Have proposal NUMBER carried out, one node after another."""
    _say(api.call("POST", f"/v1/plans/proposals/{number}/approve"), as_json)


@click.command("refuse")
@click.argument("number", type=int)
@gateway_options
def refuse(api: Api, as_json: bool, number: int) -> None:
    """Refuse proposal NUMBER; the same is not proposed again for a while."""
    _say(api.call("POST", f"/v1/plans/proposals/{number}/refuse"), as_json)


def _say(proposal: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(proposal)
        return
    at = time.strftime("%H:%M:%S")
    click.echo(f"{at} proposal {proposal['number']} is {proposal['verdict']} by {proposal['decided_by']}")


def _counts(proposal: dict[str, Any]) -> list[int]:
    return [p + d for p, d in zip(proposal["prefill"], proposal["decode"], strict=True)]


def _split(prefill: list[int], counts: list[int]) -> str:
    """N_p : N_d, all kinds together."""
    return f"{sum(prefill)} : {sum(counts) - sum(prefill)}"
