"""Options that gateways and nodes have alike: where their traces go, and what their logs look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvcache.logs import LogFormat

F = TypeVar("F", bound=Callable[..., Any])


def process_options(command: F) -> F:
    """Add ``otlp_endpoint`` and ``log_format``, the value of a LogFormat."""
    for option in (
        click.option(
            "--log-format",
            type=click.Choice([form.value for form in LogFormat]),
            default=LogFormat.TEXT.value,
            show_default=True,
            help="json: one object a line, with what a line names as its fields.",
        ),
        click.option("--otlp-endpoint", metavar="URL", help="Base URL of an OTLP/HTTP collector that gets traces."),
    ):
        command = option(command)
    return command
