"""What a key or a tenant may use, on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def rate_options(command: F) -> F:
    """Add ``--rate``, ``--tokens-per-minute`` and ``--concurrency``."""
    decorated: Any = command
    positive = click.IntRange(1)
    for option in (
        click.option("--concurrency", type=positive, help="Requests at once, those that wait included."),
        click.option("--tokens-per-minute", type=positive, help="Tokens of prompts and answers a minute."),
        click.option("--rate", type=positive, help="Requests a minute."),
    ):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def rates_text(one: dict[str, Any]) -> str:
    """The limits that there are, as a person reads them."""
    words = (("requests_per_minute", "requests/min"), ("tokens_per_minute", "tokens/min"), ("concurrency", "at once"))
    return ", ".join(f"{one[field]:,} {word}" for field, word in words if one[field] is not None) or "none"
