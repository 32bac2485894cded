"""From what an operator says of a Redis to where it is: each part is checked, and named where it is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gateway.config import ConfigError
from gateway.shared.settings import DEFAULT_PREFIX, RedisSettings
from kvcache.hosts import is_loopback

_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parse_redis(
    url: str,
    *,
    password_file: Path | None = None,
    environment_password: str | None = None,
    ca: Path | None = None,
    insecure_network: bool = False,
    prefix: str = DEFAULT_PREFIX,
) -> RedisSettings:
    """From ``redis[s]://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]``.

    A password in a file outweighs one in the environment, and that one in the URL, which others can read in the list of
    processes. Raises ConfigError, never with a password in its text.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise _bad("it is no URL") from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
        raise _bad("it is not redis[s]://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]")
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise _bad(f"the database {database[:40]!r} is no number")
    tls = parts.scheme == "rediss"
    if ca is not None and not tls:
        raise ConfigError("--redis-ca is for rediss:// alone")
    if ca is not None and not ca.is_file():
        raise ConfigError(f"--redis-ca: {ca} is not a file")
    if not tls and not is_loopback(parts.hostname) and not insecure_network:
        raise _bad(
            f"{parts.hostname} is not the loopback, and whoever reads or changes what goes there in the clear can make "
            "keys; use rediss://, or say --redis-insecure-network where nobody else is on that network"
        )
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError("--redis-prefix: 1 to 64 letters, digits, dots, dashes or underscores")
    return RedisSettings(
        host=parts.hostname,
        port=port,
        database=int(database or 0),
        username=unquote(parts.username) if parts.username else None,
        password=_password(parts.password, password_file, environment_password),
        tls=tls,
        ca=ca,
        prefix=prefix,
    )


def _password(in_url: str | None, file: Path | None, environment: str | None) -> str | None:
    if file is not None:
        try:
            found = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--redis-password-file {file}: {error}") from error
        if not found:
            raise ConfigError(f"--redis-password-file {file} is empty: put one line with the password into it")
        return found
    return environment or (unquote(in_url) if in_url else None)


def _bad(why: str) -> ConfigError:
    return ConfigError(f"--redis: {why}; say for example rediss://redis.example:6379/0")
