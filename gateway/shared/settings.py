"""Where the Redis is that gateways share, and how to show oneself there. Nothing here prints a password."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PASSWORD_VARIABLE = "PRFAAS_REDIS_PASSWORD"  # noqa: S105 (a name)
DEFAULT_PREFIX = "prfaas"


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """One database of one Redis. All that gateways keep there lies under ``prefix``."""

    host: str
    port: int = 6379
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: Path | None = None
    prefix: str = DEFAULT_PREFIX

    @property
    def where(self) -> str:
        """For people and logs."""
        scheme = "rediss" if self.tls else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.database}"
