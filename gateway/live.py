"""A configuration that can change while the gateway runs: what may, what may not, and who follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from gateway.config import ConfigError, GatewayConfig

LIVE = frozenset(
    {
        "audit",
        "breaker",
        "canary_s",
        "drain_s",
        "fallback",
        "linger_s",
        "max_body_bytes",
        "policy",
        "queue",
        "queue_timeout_s",
        "request_timeout_s",
        "threshold_tokens",
        "tls_cert",
        "tls_key",
    }
)
"""Fields of the configuration that may change while the gateway runs."""
_FLAGS = {
    "audit": "--audit-share",
    "admin_key": "--admin-key-file",
    "ca_dir": "--ca",
    "canary_s": "--canary-interval",
    "cors_origins": "--cors-origin",
    "drain_s": "--drain-timeout",
    "engines_file": "--engines",
    "join_token": "--join-token-file",
    "linger_s": "--linger",
    "max_body_bytes": "--max-body-mib",
    "model_dir": "--model",
    "node_certificate_s": "--node-certificate-hours",
    "policy": "--routing, --remote-slack, --price-seconds or --remote-codec",
    "breaker": "--breaker-failures, --breaker-successes or --breaker-open",
    "queue_timeout_s": "--queue-timeout",
    "rebalance_file": "--rebalance-config",
    "redis": "--redis",
    "request_timeout_s": "--request-timeout",
    "state_file": "--state",
    "threshold_auto": "--threshold",
    "threshold_tokens": "--threshold",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that became another."""

    option: str
    was: Any
    now: Any


class LiveConfig:
    """``now`` is in force. A follower is called with the new one after every change, and must not fail."""

    def __init__(self, config: GatewayConfig) -> None:
        self.now = config
        self._followers: list[Callable[[GatewayConfig], None]] = []

    def follow(self, follower: Callable[[GatewayConfig], None]) -> None:
        """Call it after every change."""
        self._followers.append(follower)

    def check(self, new: GatewayConfig) -> list[Change]:
        """What would change. Raises ConfigError, naming every option that cannot change while the gateway runs."""
        old = self.now
        names = [field.name for field in fields(old) if getattr(old, field.name) != getattr(new, field.name)]
        fixed = {name for name in names if name not in LIVE}
        if "threshold_tokens" in names and old.threshold_auto:
            fixed.add("threshold_tokens")
        if (old.tls_cert is None) != (new.tls_cert is None):
            fixed.add("tls_cert")
        if fixed:
            flags = ", ".join(sorted({flag_of(name) for name in fixed}))
            raise ConfigError(f"{flags} cannot change while the gateway runs: restart it; nothing was changed")
        return [Change(flag_of(name), getattr(old, name), getattr(new, name)) for name in names]

    def take(self, new: GatewayConfig) -> None:
        """Put a configuration in force that ``check`` let pass."""
        self.now = new
        for follower in self._followers:
            follower(new)


def flag_of(field: str) -> str:
    """The option that a field of the configuration is set by."""
    return _FLAGS.get(field, f"--{field.replace('_', '-')}")
