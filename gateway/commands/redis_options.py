"""Options of `prfaas gateway` about the Redis that several gateways share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.config import ConfigError
from gateway.shared.redis_url import parse_redis
from gateway.shared.settings import DEFAULT_PREFIX, PASSWORD_VARIABLE, RedisSettings

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False, path_type=Path)


def redis_options(command: F) -> F:
    """Add them."""
    for option in (
        click.option(
            "--advertise",
            metavar="URL",
            help="Where nodes reach this gateway, for those that share a Redis to tell; by default where it is bound.",
        ),
        click.option("--redis-prefix", default=DEFAULT_PREFIX, show_default=True, help="Of all that lies in Redis."),
        click.option(
            "--redis-insecure-network",
            is_flag=True,
            help="Speak with a Redis off the loopback in the clear: whoever is on that network can make keys.",
        ),
        click.option("--redis-ca", type=_FILE, help="Root of the Redis's certificate, if not a public one."),
        click.option(
            "--redis-password-file", type=_FILE, help=f"One line; else {PASSWORD_VARIABLE} or what the URL says."
        ),
        click.option(
            "--redis",
            metavar="URL",
            envvar="PRFAAS_REDIS_URL",
            help="redis[s]://HOST:PORT/DATABASE that several gateways share, which then act as one.",
        ),
    ):
        command = option(command)
    return command


def redis_settings(
    url: str | None, password_file: Path | None, ca: Path | None, insecure_network: bool, prefix: str
) -> RedisSettings | None:
    """What the options say; None for a gateway that shares with nobody. Raises ConfigError."""
    if url is None:
        if password_file is not None or ca is not None or insecure_network:
            raise ConfigError("--redis: missing; the other --redis options are about it")
        return None
    return parse_redis(
        url,
        password_file=password_file,
        environment_password=os.environ.get(PASSWORD_VARIABLE),
        ca=ca,
        insecure_network=insecure_network,
        prefix=prefix,
    )


def advertised(url: str | None) -> str | None:
    """An address that nodes can be told. Raises ConfigError."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--advertise: {url[:80]!r} is no http or https URL")
    return None if url is None else url.rstrip("/")
