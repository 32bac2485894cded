"""Everything a node was told at its start, parsed once. Each error names the flag and the cure."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from kvcache.checkpoints import CheckpointPolicy
from kvcache.control import KvAddress
from kvcache.hosts import is_every_address, is_loopback
from kvcache.join_token import JoinToken
from kvcache.layout import DType
from kvcache.wire import Role
from node.tier_config import TierConfig
from node.topology.machine import ThisMachine
from node.topology.place import parse_place, read_labels

STREAM_PATH = "/v1/nodes/stream"
CODEC_THREADS = 2
"""That encode and decode transfers, beside the engine."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SCHEMES = {"http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}


class ConfigError(ValueError):
    """A flag whose value cannot work."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the KV port. ``cert`` and ``key`` come together; ``ca`` is what peers are checked against."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether they allow mutual TLS."""
        return None not in (self.cert, self.key, self.ca)


@dataclass(frozen=True, slots=True)
class KvPort:
    """The port that KV peers dial. ``port`` 0 takes a free one; ``advertise`` None advertises what was bound."""

    host: str
    port: int
    advertise: KvAddress | None


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where events of the prefix cache are published over ZMQ, and where missed ones can be asked for."""

    publish: str
    replay: str | None = None


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node. ``kv_port`` None opens no port: this node only dials, and keeps ``kv_connections`` to each peer.

    ``stream_urls`` are those of the gateways that it was told of; where these share their state, it learns the others.

    ``otlp_endpoint`` is the base URL of a collector of traces. ``place`` is what was said of where its machine stands,
    by the names of ``node.topology.place``.
    With ``shared_memory`` KV may go to and from other processes of this host through memory, with ``nixl`` to and from
    other hosts through RDMA.
    """

    role: Role
    cluster: str
    node_id: str
    stream_urls: tuple[str, ...]
    gateway_ca: Path | None
    join_token: str | None = field(repr=False)
    model_dir: Path
    model_name: str
    dtype: DType
    kv_port: KvPort | None
    kv_tls: TlsFiles
    kv_connections: int
    pool_bytes: int
    threads: int
    chunk_tokens: int
    max_queue: int
    max_running: int
    prefix_cache: bool = True
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    kv_events: EventEndpoints | None = None
    place: Mapping[str, str] = field(default_factory=dict)
    tiers: TierConfig = field(default_factory=TierConfig)
    shared_memory: bool = True
    nixl: bool = False
    otlp_endpoint: str | None = None


def stream_url(gateway: str) -> str:
    """The control stream's WebSocket URL at a gateway given as http(s) or ws(s) URL. Raises ConfigError."""
    try:
        parts = urlsplit(gateway)
        parts.port  # noqa: B018 (raises where it is none)
    except ValueError as error:
        raise ConfigError(f"--gateway: {gateway!r}: {error}; say for example http://127.0.0.1:8000") from error
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ConfigError(f"--gateway: {gateway!r} is no http or https URL; say for example http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError("--gateway: give scheme, host and port only; the join token comes from --join-token-file")
    scheme = _SCHEMES[parts.scheme]
    if scheme == "ws" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"--gateway: {parts.hostname} is not the loopback, prompts and the join token would cross in the clear; "
            "use https (and --gateway-ca for a root of your own)"
        )
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + STREAM_PATH, "", ""))


def parse_address(text: str, flag: str) -> KvAddress:
    """HOST:PORT, with IPv6 hosts in brackets. Raises ConfigError."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port and parts.netloc == text and "@" not in text:
            return KvAddress(parts.hostname, parts.port)
    except ValueError:
        pass
    raise ConfigError(f"{flag}: {text!r} is not HOST:PORT")


def kv_port(role: Role, dial: str | None, host: str | None, port: int, advertise: str | None) -> KvPort | None:
    """The port to open, or None for ``dial`` out. Prefill nodes listen unless told otherwise. Raises ConfigError."""
    if dial is None:
        dial = "in" if role is Role.PREFILL or host is not None else "out"
    if dial == "out":
        if host is not None or port or advertise is not None:
            raise ConfigError("--dial out opens no port: leave out --kv-host, --kv-port and --kv-advertise")
        return None
    bind = host or "127.0.0.1"
    address = parse_address(advertise, "--kv-advertise") if advertise else None
    if is_every_address(bind) and address is None:
        raise ConfigError(f"--kv-advertise: --kv-host {bind} is no address that a peer can dial; say HOST:PORT to dial")
    return KvPort(bind, port, address)


def check_tls(files: TlsFiles, port: KvPort | None, join_token: str | None = None) -> TlsFiles:
    """Refuse what would put KV on a network in the clear, and files that are not there. Raises ConfigError.

    A join token that names a root gets the node a certificate for its KV port, too.
    """
    if (files.cert is None) != (files.key is None):
        raise ConfigError("--kv-tls-cert and --kv-tls-key belong together: give both or neither")
    if files.cert is not None and files.ca is None:
        raise ConfigError("--kv-tls-ca: missing; KV peers are checked on both sides, so name the root that signed them")
    for flag, path in (("--kv-tls-cert", files.cert), ("--kv-tls-key", files.key), ("--kv-tls-ca", files.ca)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{flag}: {path} is not a file")
    if port is not None and not is_loopback(port.host) and not files.complete and not _gets_certificate(join_token):
        raise ConfigError(
            f"--kv-host: {port.host} is not the loopback; join with a token of a gateway that has --ca, give "
            "--kv-tls-cert, --kv-tls-key and --kv-tls-ca, or bind 127.0.0.1"
        )
    return files


def _gets_certificate(join_token: str | None) -> bool:
    try:
        return join_token is not None and bool(JoinToken.parse(join_token).root)
    except ValueError:
        return False


def event_endpoints(publish: str | None, replay: str | None, insecure_network: bool) -> EventEndpoints | None:
    """The ZMQ endpoints to bind, or None for none. Raises ConfigError, also for what others than this machine reach."""
    if publish is None:
        if replay is not None or insecure_network:
            raise ConfigError("--kv-events-endpoint: missing; nothing is published over ZMQ without it")
        return None
    for flag, endpoint in (("--kv-events-endpoint", publish), ("--kv-events-replay-endpoint", replay)):
        if endpoint is None:
            continue
        if not endpoint.startswith("tcp://"):
            raise ConfigError(f"{flag}: {endpoint!r} is not tcp://HOST:PORT")
        host = parse_address(endpoint.removeprefix("tcp://"), flag).host
        if not is_loopback(host) and not insecure_network:
            raise ConfigError(
                f"{flag}: {host} is not the loopback, and ZMQ has neither credentials nor encryption here: whoever "
                "reaches the port reads the token ids of prompts; bind 127.0.0.1, or say "
                "--kv-events-insecure-network where nobody else is on that network"
            )
    if publish == replay:
        raise ConfigError("--kv-events-replay-endpoint: must differ from --kv-events-endpoint")
    return EventEndpoints(publish, replay)


def pool_pages(pool_bytes: int, page_bytes: int) -> int:
    """How many pages the pool has. Raises ConfigError for a pool without a page, or larger than the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pool_bytes > memory:
        raise ConfigError(f"--pool-mib: {pool_bytes >> 20}, but this machine has {memory >> 20} MiB of memory")
    if pool_bytes < page_bytes:
        raise ConfigError(f"--pool-mib: too small, one page of this model takes {page_bytes} bytes")
    return pool_bytes // page_bytes


def checkpoints(interval: int, block_tokens: int) -> CheckpointPolicy:
    """Where prefills leave snapshots. Raises ConfigError for an interval off the block grid."""
    if interval % block_tokens:
        near = max(1, round(interval / block_tokens)) * block_tokens
        raise ConfigError(
            f"--snapshot-interval: {interval} is no multiple of {block_tokens}; say {near}, or 0 for none"
        )
    return CheckpointPolicy(interval)


def place(said: str | None, pod_labels: Path | None) -> dict[str, str]:
    """Where this machine stands: what ``--place`` says outweighs the labels of the pod. Raises ConfigError."""
    try:
        labels = read_labels(ThisMachine(), str(pod_labels)) if pod_labels else {}
    except ValueError as error:
        raise ConfigError(f"--pod-labels: {error}") from error
    try:
        return labels | (parse_place(said) if said else {})
    except ValueError as error:
        raise ConfigError(f"--place: {error}") from error


def name(value: str, flag: str) -> str:
    """A name that is safe in a header, a path and a log line. Raises ConfigError."""
    if not _NAME.fullmatch(value):
        raise ConfigError(f"{flag}: {value!r} must be 1 to 63 letters, digits, dots, dashes or underscores")
    return value


def default_node_id(role: Role) -> str:
    """Readable, and different on every start, so that two nodes of one machine never share it."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0]).strip("-")[:32] or "node"
    return f"{host}-{role.name.lower()}-{secrets.token_hex(3)}"


def read_secret(path: Path | None, flag: str) -> str | None:
    """The one line of a secret's file. Raises ConfigError."""
    if path is None:
        return None
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error}") from error
    if not secret or not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"{flag}: {path} must hold one line of printable ASCII")
    return secret
