"""Which external engines there are: a TOML file, parsed into frozen values and checked as a whole.

::

    [[engine]]
    url = "http://10.0.0.7:8000"    # http or https; /v1/... of it is spoken to
    model = "gemma"                 # as it calls what it serves, and as clients ask for it
    role = "prefill"                # prefill, decode or both, the default
    dialect = "vllm-nixl-pull"      # openai, the default: whole requests go to one engine
    cluster = "east"                # where it is; by default where the gateway is
    name = "p0"                     # by default HOST-PORT
    max_running = 256               # requests that it is given at once
    key_file = "/etc/prfaas/p0.key" # sent to it as a bearer token
    ranks = 2                       # of data parallelism; requests name one in X-data-parallel-rank
    bootstrap = "10.0.0.7:8998"     # of prefill engines that speak vllm-mooncake or sglang; by default its host, 8998
    lease_s = 30                    # for how long a prefill engine of vllm-nixl-* keeps KV that nobody fetched

    [[kubernetes]]                  # engines in pods, found by label; the rest as of an engine
    selector = "app=vllm,tier=prefill"
    namespace = "serving"           # by default the gateway's own
    port = 8000
    scheme = "http"                 # or https
    model = "gemma"
    role = "prefill"
    dialect = "vllm-nixl-pull"

Of one model all engines speak the same dialect. Answers are spoken where the gateway is, so a decode engine is there;
one of role ``both`` decodes there and prefills elsewhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gateway.config import NAME, ConfigError
from gateway.upstream.head import split_url

K = TypeVar("K", bound=StrEnum)
R = TypeVar("R")

BOOTSTRAP_PORT = 8998
_MOST_ENGINES = 4096
_MOST_RANKS = 1024
_MOST_SELECTORS = 64


class EngineRole(StrEnum):
    """What an engine was started to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class DialectName(StrEnum):
    """How prefill and decode of one request are asked for, by the engines that understand it."""

    OPENAI = "openai"
    VLLM_NIXL_PULL = "vllm-nixl-pull"
    VLLM_NIXL_PUSH = "vllm-nixl-push"
    VLLM_MOONCAKE = "vllm-mooncake"
    SGLANG = "sglang"

    @property
    def splits(self) -> bool:
        """Whether prefill and decode of one request may be on two engines."""
        return self is not DialectName.OPENAI

    @property
    def has_bootstrap(self) -> bool:
        """Whether the decode engine finds the KV by way of an address of the prefill engine."""
        return self in (DialectName.VLLM_MOONCAKE, DialectName.SGLANG)

    @property
    def has_lease(self) -> bool:
        """Whether a prefill engine keeps KV for a while after it has answered."""
        return self in (DialectName.VLLM_NIXL_PULL, DialectName.VLLM_NIXL_PUSH)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. ``url`` has no path and no slash at its end; ``bootstrap`` is host:port, "" where it has none."""

    url: str
    name: str
    model: str
    role: EngineRole = EngineRole.BOTH
    dialect: DialectName = DialectName.OPENAI
    cluster: str = "local"
    max_running: int = 256
    key: str | None = field(default=None, repr=False)
    ranks: int = 1
    bootstrap: str = ""
    lease_s: float = 30.0

    @property
    def host(self) -> str:
        """Of its URL, without brackets."""
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, slots=True)
class PodEngines:
    """Engines in pods of these ``labels``; ``namespace`` "" is the gateway's own. ``table`` says the rest."""

    labels: str
    namespace: str
    scheme: str
    port: int
    table: tuple[tuple[str, Any], ...]
    local_cluster: str

    def engine(self, pod: str, address: str) -> EngineConfig:
        """The engine of one pod."""
        host = f"[{address}]" if ":" in address else address
        told = {**dict(self.table), "name": pod[:63], "url": f"{self.scheme}://{host}:{self.port}"}
        return _engine(told, f"pod {pod}", self.local_cluster)


def read(file: Path, local_cluster: str) -> tuple[EngineConfig, ...]:
    """The engines that a file lists. Raises ConfigError naming the field and the cure."""
    return _read(file, lambda found: parse(found, local_cluster))


def read_pods(file: Path, local_cluster: str) -> tuple[PodEngines, ...]:
    """The pods by whose labels a file has engines found. Raises ConfigError naming the field and the cure."""
    return _read(file, lambda found: parse_pods(found, local_cluster))


def _read(file: Path, made: Callable[[dict[str, Any]], R]) -> R:
    try:
        with file.open("rb") as source:
            found = tomllib.load(source)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--engines {file}: {error}") from error
    try:
        return made(found)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--engines {file}: {error}") from error


def parse(found: dict[str, Any], local_cluster: str) -> tuple[EngineConfig, ...]:
    """The engines that a file lists. Raises ValueError naming the field, OSError for a key that cannot be read."""
    tables = found.get("engine", [] if "kubernetes" in found else None)
    if unknown := sorted(set(found) - {"engine", "kubernetes"}):
        raise ValueError(f"{unknown[0]}: unknown; the file has tables [[engine]] and [[kubernetes]]")
    if not isinstance(tables, list) or not (tables or "kubernetes" in found):
        raise ValueError("engine: needs at least one table [[engine]], or [[kubernetes]]")
    if len(tables) > _MOST_ENGINES:
        raise ValueError(f"engine: {len(tables)} tables, at most {_MOST_ENGINES}")
    engines = tuple(_engine(table, f"engine[{at}]", local_cluster) for at, table in enumerate(tables))
    _check_together(engines)
    return engines


def parse_pods(found: dict[str, Any], local_cluster: str) -> tuple[PodEngines, ...]:
    """The tables [[kubernetes]] of a file, each tried with a pod. Raises ValueError naming the field, and OSError."""
    tables = found.get("kubernetes", [])
    if not isinstance(tables, list) or len(tables) > _MOST_SELECTORS:
        raise ValueError(f"kubernetes: at most {_MOST_SELECTORS} tables [[kubernetes]]")
    return tuple(_pod_engines(table, f"kubernetes[{at}]", local_cluster) for at, table in enumerate(tables))


def _pod_engines(table: Any, where: str, local_cluster: str) -> PodEngines:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: must be a table")
    own = {"selector", "namespace", "port", "scheme"}
    for field_name in ("url", "name", "bootstrap"):
        if field_name in table:
            raise ValueError(f"{where}.{field_name}: follows from the pod; leave it out")
    scheme = _text(table, "scheme", where, "http")
    if scheme not in ("http", "https"):
        raise ValueError(f"{where}.scheme: {scheme!r} must be http or https")
    namespace = "" if "namespace" not in table else _name(_text(table, "namespace", where), f"{where}.namespace")
    rest = tuple(sorted((name, value) for name, value in table.items() if name not in own))
    port = _whole(table, "port", 8000, 65535, where)
    one = PodEngines(_text(table, "selector", where), namespace, scheme, port, rest, local_cluster)
    try:
        one.engine("pod", "192.0.2.1")
    except ValueError as error:
        raise ValueError(str(error).replace("pod pod", where, 1)) from error
    return one


def _engine(table: Any, where: str, local_cluster: str) -> EngineConfig:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: must be a table")
    if unknown := sorted(set(table) - _FIELDS):
        raise ValueError(f"{where}.{unknown[0]}: unknown; known are {', '.join(sorted(_FIELDS))}")
    url, host, port = _url(_text(table, "url", where), f"{where}.url")
    dialect = _one_of(DialectName, table, "dialect", DialectName.OPENAI, where)
    role = _one_of(EngineRole, table, "role", EngineRole.BOTH, where)
    cluster = _name(_text(table, "cluster", where, local_cluster), f"{where}.cluster")
    if not dialect.splits and role is not EngineRole.BOTH:
        raise ValueError(f"{where}.role: an engine of dialect {dialect} does both; leave role out, or name a dialect")
    if dialect.splits and role is EngineRole.DECODE and cluster != local_cluster:
        raise ValueError(f"{where}.cluster: a decode engine is where the gateway is, in {local_cluster!r}")
    for name, has in (("bootstrap", dialect.has_bootstrap), ("lease_s", dialect.has_lease)):
        if name in table and not has:
            raise ValueError(f"{where}.{name}: dialect {dialect} has none; leave it out")
    bootstrap = ""
    if dialect.has_bootstrap:
        bracketed = f"[{host}]" if ":" in host else host
        bootstrap = _host_port(_text(table, "bootstrap", where, f"{bracketed}:{BOOTSTRAP_PORT}"), f"{where}.bootstrap")
    return EngineConfig(
        url=url,
        name=_name(_text(table, "name", where, _default_name(host, port)), f"{where}.name"),
        model=_text(table, "model", where),
        role=role,
        dialect=dialect,
        cluster=cluster,
        max_running=_whole(table, "max_running", 256, 1 << 20, where),
        key=_key(table, where),
        ranks=_whole(table, "ranks", 1, _MOST_RANKS, where),
        bootstrap=bootstrap,
        lease_s=_seconds(table, "lease_s", 30.0, where),
    )


_FIELDS = set(EngineConfig.__dataclass_fields__) - {"key"} | {"key_file"}


def _check_together(engines: Sequence[EngineConfig]) -> None:
    """Raise ValueError for what no engine says wrong alone."""
    names: set[str] = set()
    dialects: dict[str, DialectName] = {}
    for at, one in enumerate(engines):
        if one.name in names:
            raise ValueError(f"engine[{at}].name: {one.name!r} is there twice; give each engine a name of its own")
        names.add(one.name)
        if dialects.setdefault(one.model, one.dialect) is not one.dialect:
            raise ValueError(f"engine[{at}].dialect: other engines of {one.model!r} speak {dialects[one.model]}")


def _url(text: str, where: str) -> tuple[str, str, int]:
    """Without what is not the origin; its host and port."""
    parts = urlsplit(text)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(f"{where}: {text!r}: {error}") from error
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or not text.isprintable():
        raise ValueError(f"{where}: {text!r} must be http://HOST:PORT or https://HOST:PORT, without a path")
    _check_reachable(text, where)
    return f"{parts.scheme}://{parts.netloc}", parts.hostname, port


def _host_port(text: str, where: str) -> str:
    try:
        parts = urlsplit(f"//{text}")
        right = bool(parts.hostname and parts.port) and parts.netloc == text and "@" not in text
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"{where}: {text!r} is not HOST:PORT")
    _check_reachable(f"http://{text}", where)
    return text


def _check_reachable(url: str, where: str) -> None:
    """Raise ValueError for what could never be connected to: one such engine would fail every look at all of them."""
    try:
        split_url(url)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _default_name(host: str, port: int) -> str:
    """Host and port in a name's alphabet."""
    return f"{'v6-' if ':' in host else ''}{host.replace(':', '-')}-{port}"


def _key(table: dict[str, Any], where: str) -> str | None:
    if "key_file" not in table:
        return None
    key = Path(_text(table, "key_file", where)).read_text(encoding="utf-8").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ValueError(f"{where}.key_file: must hold one line of printable ASCII")
    return key


def _text(table: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = table.get(name, default)
    if value is None:
        raise ValueError(f"{where}.{name}: missing")
    if not isinstance(value, str) or not 1 <= len(value) <= 1024 or not value.isprintable():
        raise ValueError(f"{where}.{name}: must be a text, got {value!r}")
    return value


def _name(text: str, where: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(f"{where}: {text!r} must be 1 to 63 letters, digits, dots, dashes or underscores")
    return text


def _one_of(kind: type[K], table: dict[str, Any], name: str, default: K, where: str) -> K:
    try:
        return kind(table.get(name, default))
    except ValueError:
        raise ValueError(f"{where}.{name}: {table[name]!r} must be one of {', '.join(kind)}") from None


def _whole(table: dict[str, Any], name: str, default: int, most: int, where: str) -> int:
    value = table.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{where}.{name}: must be a whole number from 1 to {most}, got {value!r}")
    return value


def _seconds(table: dict[str, Any], name: str, default: float, where: str) -> float:
    value = table.get(name, default)
    if type(value) not in (int, float) or not 0 < value <= 86_400:
        raise ValueError(f"{where}.{name}: must be seconds above 0 and at most 86400, got {value!r}")
    return float(value)
