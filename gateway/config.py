"""The gateway's configuration, parsed once into one object and checked as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gateway.cors import ORIGIN
from gateway.shared.settings import RedisSettings
from kvcache.hosts import is_every_address, is_loopback
from kvcache.layout import DType
from scheduler.auditing import AuditValues
from scheduler.breaker import BreakerValues
from scheduler.controller.settings import Mode
from scheduler.values import PolicyValues

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Of clusters and nodes: safe in a header, a path and a log line. To be matched in full."""
_TCP = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}")


class ConfigError(ValueError):
    """A configuration that cannot start; the text names the option and the cure."""


class FallbackPolicy(StrEnum):
    """What happens when a first attempt fails or is late: prefill at home, or answer 503."""

    LOCAL = "local"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Where the engine of a node publishes events of its KV cache over ZMQ, and where missed ones can be asked for."""

    node_id: str
    publish: str
    replay: str | None = None

    @classmethod
    def parse(cls, text: str) -> EngineEvents:
        """From NODE=tcp://HOST:PORT[,tcp://HOST:PORT]. Raises ConfigError."""
        node_id, _, addresses = text.partition("=")
        publish, *rest = addresses.split(",")
        if not NAME.fullmatch(node_id) or len(rest) > 1 or not all(_TCP.fullmatch(one) for one in (publish, *rest)):
            raise ConfigError(
                f"--kv-events: {text!r} is not NODE=tcp://HOST:PORT or NODE=tcp://HOST:PORT,tcp://HOST:PORT"
            )
        return cls(node_id, publish, *rest)


DEFAULT_POLICY = PolicyValues()
DEFAULT_BREAKER = BreakerValues()
DEFAULT_AUDIT = AuditValues()


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All that an operator sets. Times are seconds, sizes bytes; ``otlp_endpoint`` is a collector's base URL.

    ``workers`` processes share the port, each a gateway among several over Redis.
    ``engines_file`` lists engines that were not started by prfaas. ``model_dir`` None: there are no others.
    ``queue`` requests may wait for a node with room, each for ``queue_timeout_s``.
    ``handover`` is the UNIX socket by which gateways of one port take over from each other.
    ``canary_s``: so long a node may prove nothing before it is tried; 0: it never is.
    ``threshold_auto``: ``threshold_tokens`` is where it starts, and what traffic, nodes and links make of it follows.
    """

    model_dir: Path | None
    model_name: str
    dtype: DType = DType.BFLOAT16
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    local_cluster: str = "local"
    threshold_tokens: int = 1024
    threshold_auto: bool = False
    policy: PolicyValues = DEFAULT_POLICY
    breaker: BreakerValues = DEFAULT_BREAKER
    fallback: FallbackPolicy = FallbackPolicy.LOCAL
    state_file: Path | None = None
    engines_file: Path | None = None
    redis: RedisSettings | None = None
    advertise: str | None = None
    kv_events: tuple[EngineEvents, ...] = ()
    rebalance: Mode = Mode.OBSERVE
    rebalance_file: Path | None = None
    chat_template: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    admin_key: str | None = field(default=None, repr=False)
    join_token: str | None = None
    ca_dir: Path | None = None
    node_certificate_s: float = 86400.0
    request_timeout_s: float = 1800.0
    max_body_bytes: int = 16 << 20
    max_in_flight: int = 2048
    queue: int = 1000
    queue_timeout_s: float = 60.0
    lease_s: float = 3.5
    beat_s: float = 1.0
    drain_s: float = 30.0
    linger_s: float = 0.0
    canary_s: float = 30.0
    handover: Path | None = None
    audit: AuditValues = DEFAULT_AUDIT
    otlp_endpoint: str | None = None
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.model_dir is None and self.engines_file is None:
            raise ConfigError("--model: missing; name the model's directory, or with --engines what serves without one")
        if self.model_dir is None and self.chat_template is not None:
            raise ConfigError("--chat-template: is of --model, which is missing")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together: give both or neither")
        if not NAME.fullmatch(self.local_cluster):
            raise ConfigError(
                f"--local-cluster: {self.local_cluster!r} must be 1 to 63 letters, digits, dots, dashes or underscores"
            )
        if self.threshold_tokens < 0:
            raise ConfigError(f"--threshold must not be negative, got {self.threshold_tokens}")
        if not 0 < self.request_timeout_s <= 86400:
            raise ConfigError(f"--request-timeout must lie in (0, 86400] seconds, got {self.request_timeout_s}")
        if not 0 <= self.queue <= self.max_in_flight:
            raise ConfigError(f"--queue must lie in [0, {self.max_in_flight}], got {self.queue}")
        if not self.queue_timeout_s > 0:
            raise ConfigError(f"--queue-timeout must be positive, got {self.queue_timeout_s}")
        if not 0 < self.drain_s <= 86400:
            raise ConfigError(f"--drain-timeout must lie in (0, 86400] seconds, got {self.drain_s}")
        if not 0 <= self.linger_s <= 3600:
            raise ConfigError(f"--linger must lie in [0, 3600] seconds, got {self.linger_s}")
        if not 0 <= self.canary_s <= 86400:
            raise ConfigError(f"--canary-interval must lie in [0, 86400] seconds, got {self.canary_s}")
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(f"--cors-origin: {origin!r} is no origin, as https://chat.example is")
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-mib must be positive, got {self.max_body_bytes} bytes")
        if self.ca_dir is not None and self.tls_cert is None:
            raise ConfigError("--ca needs --tls-cert and --tls-key: nodes show their certificates over TLS")
        if self.ca_dir is not None and self.join_token is not None:
            raise ConfigError("--ca and --join-token-file: with --ca each cluster has a join token of its own")
        if not 60 <= self.node_certificate_s <= 90 * 86400:
            raise ConfigError(
                f"--node-certificate-hours must lie in [1/60, 2160], got {self.node_certificate_s / 3600:g}"
            )
        if self.join_token is not None and not (self.join_token.isascii() and self.join_token.isprintable()):
            raise ConfigError("--join-token-file must hold one line of printable ASCII, as a node can send it")
        if self.join_token is not None and not self.join_token:
            raise ConfigError("--join-token-file is empty: put one line with the token into it")

    def url(self, port: int) -> str:
        """Where nodes reach this gateway, which listens on that port. Raises ConfigError where nobody could know."""
        if self.advertise is not None:
            return self.advertise
        host = self.host.strip("[]")
        if is_every_address(host) and self.redis is not None:
            raise ConfigError(f"--advertise: --host {host} is no address that nodes can dial; say URL to be dialled at")
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the address that the gateway binds."""
        return is_loopback(self.host)

    def check_exposure(self, has_keys: bool) -> None:
        """Raise ConfigError unless it is safe to bind: off the loopback a gateway has keys and speaks TLS."""
        if self.on_loopback:
            return
        missing = []
        if not has_keys:
            missing.append("no API key exists: create one with `prfaas keys create --role admin --state FILE`")
        if self.tls_cert is None:
            missing.append("no TLS: give --tls-cert FILE and --tls-key FILE")
        if missing:
            raise ConfigError(f"refusing to listen on {self.host}, off the loopback; {'; '.join(missing)}")
