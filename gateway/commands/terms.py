"""What operators say of a cluster on the command line: where it is, whether it is trusted, what it costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gateway.commands.inputs import Finite

F = TypeVar("F", bound=Callable[..., Any])

HOURS = 24
_PART = re.compile(r"([0-9]{1,2})-([0-9]{1,2})=([0-9.]+)")


def terms_options(command: F) -> F:
    """Add the flags that ``terms_body`` takes."""
    decorated: Any = command
    for option in (
        click.option(
            "--price-hours",
            metavar="A-B=FACTOR,...",
            help="What prices are multiplied by from hour A to before hour B, UTC; 1 in all other hours.",
        ),
        click.option("--prefill-price", type=Finite(0), help="Price of a second of prefill on one node."),
        click.option("--egress-price", type=Finite(0), help="Price of a GB that leaves it."),
        click.option("--trusted/--not-trusted", default=None, help="Whether its operator is trusted."),
        click.option("--model", "models", multiple=True, help="It may serve this model only; may be repeated."),
        click.option(
            "--endpoint",
            "endpoints",
            multiple=True,
            metavar="HOST|CIDR",
            help="Where its nodes' KV ports may be; may be repeated.  [default: anywhere]",
        ),
        click.option(
            "--residency", multiple=True, help="Another name for where its data stays, as keys' --region; repeatable."
        ),
        click.option("--region", help="Where it is, as keys name it in --region."),
    ):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def terms_body(
    region: str | None,
    trusted: bool | None,
    egress_price: float | None,
    prefill_price: float | None,
    price_hours: str | None,
    residency: tuple[str, ...],
    endpoints: tuple[str, ...],
    models: tuple[str, ...],
    known: dict[str, Any],
) -> dict[str, Any]:
    """What to send of it: only what was given. Prices that were not given stay as they are ``known``."""
    body: dict[str, Any] = {}
    if region is not None:
        body["region"] = region
    if trusted is not None:
        body["trusted"] = trusted
    lists = {"residency": residency, "endpoints": endpoints, "models": models}
    body |= {field: listed for field, listed in lists.items() if listed}
    prices = {"egress_per_gb": egress_price, "prefill_per_s": prefill_price}
    given = {name: value for name, value in prices.items() if value is not None}
    if price_hours is not None:
        given["by_hour"] = hours(price_hours)  # type: ignore[assignment]
    if given:
        body["prices"] = known | given
    return body


def hours(text: str) -> list[float]:
    """One factor for each hour of the day; a part may pass midnight, as in 22-6=0.5. Raises BadParameter."""
    factors = [1.0] * HOURS
    for part in filter(None, text.split(",")):
        found = _PART.fullmatch(part.strip())
        if found is None or int(found[1]) >= HOURS or int(found[2]) > HOURS:
            raise click.BadParameter(f"{part!r} is not A-B=FACTOR with hours from 0 to 24", param_hint="--price-hours")
        try:
            factor = float(found[3])
        except ValueError:
            raise click.BadParameter(f"{found[3]!r} is not a number", param_hint="--price-hours") from None
        start, length = int(found[1]), (int(found[2]) - int(found[1])) % HOURS or HOURS
        for hour in range(start, start + length):
            factors[hour % HOURS] = factor
    return factors
