"""What a key permits, on the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from gateway.commands.inputs import Finite
from gateway.commands.rates import rate_options, rates_text
from gateway.terms import KeyLimits

F = TypeVar("F", bound=Callable[..., Any])
DAY_S = 86400.0
LIFTED: Mapping[str, Mapping[str, Any]] = {
    "cluster": {"clusters": None},
    "not-cluster": {"barred": []},
    "region": {"regions": None},
    "model": {"models": None},
    "expiry": {"expires": None},
    "token-budget": {"token_budget": None},
    "rate": {"requests_per_minute": None},
    "tokens-per-minute": {"tokens_per_minute": None},
    "concurrency": {"concurrency": None},
}
"""Limits by their options, and what a change says to be without one."""
_NAMES = {
    "clusters": "clusters",
    "barred": "barred",
    "regions": "regions",
    "models": "models",
    "token_budget": "token_budget",
    "rate": "requests_per_minute",
    "tokens_per_minute": "tokens_per_minute",
    "concurrency": "concurrency",
}


def limit_options(command: F) -> F:
    """Add the options of what both new keys and changes may say."""
    decorated: Any = rate_options(command)
    for option in (
        click.option("--token-budget", type=click.IntRange(1), help="Tokens of prompts and answers in all."),
        click.option("--expires-in-days", type=Finite(0, min_open=True), help="Worth nothing after so many days."),
        click.option("--model", "models", multiple=True, help="Only this model; may be repeated."),
        click.option("--region", "regions", multiple=True, help="Prompts may be in these regions only; repeatable."),
        click.option("--not-cluster", "barred", multiple=True, help="Prompts may not reach this cluster; repeatable."),
        click.option("--cluster", "clusters", multiple=True, help="Only these remote clusters; may be repeated."),
    ):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def limits_of(given: Mapping[str, Any], **others: Any) -> tuple[frozenset[str] | None, KeyLimits]:
    """The clusters and the limits of a new key."""
    fields = _given(given)
    clusters = fields.pop("clusters", None)
    for name in ("barred", "regions", "models"):
        if name in fields:
            fields[name] = frozenset(fields[name])
    return None if clusters is None else frozenset(clusters), KeyLimits(**fields, **others)


def changes(given: Mapping[str, Any], lifted: tuple[str, ...]) -> dict[str, Any]:
    """The body of a change. Raises UsageError where a limit is both given and taken away."""
    fields = _given(given)
    for name in lifted:
        if LIFTED[name].keys() & fields.keys():
            raise click.UsageError(f"--lift {name}: it is given, too; say one of both")
        fields |= LIFTED[name]
    return fields


def limits_text(one: Mapping[str, Any]) -> str:
    """The limits that there are, as a person reads them."""
    rates = rates_text(dict(one))
    words = [] if rates == "none" else [rates]
    if one["models"] is not None:
        words.append(f"models {', '.join(one['models']) or 'none'}")
    if one["token_budget"] is not None:
        words.append(f"{one['tokens_used']:,} of {one['token_budget']:,} tokens used")
    if one["expires"] is not None:
        words.append(f"until {datetime.fromtimestamp(one['expires'], UTC):%Y-%m-%d %H:%M} UTC")
    return ", ".join(words) or "none"


def _given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the API for the options that were given."""
    fields: dict[str, Any] = {}
    for option, field in _NAMES.items():
        value = given[option]
        if value not in (None, ()):
            fields[field] = list(value) if isinstance(value, tuple) else value
    if given["expires_in_days"] is not None:
        fields["expires"] = time.time() + given["expires_in_days"] * DAY_S
    return fields
