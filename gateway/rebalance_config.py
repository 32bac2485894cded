"""How the long-term loop is set up: a mode, and a TOML file for the rest, parsed once.

::

    step_s = 10                     # seconds between two looks
    [controller]                    # fields of scheduler.controller.settings.ControllerSettings
    dwell_s = 60
    [limits]                        # seconds that each phase of a conversion may take
    drain_s = 600
    [kubernetes]                    # where pods are labelled
    url = "https://kubernetes.default.svc"
    namespace = "prfaas"
    label = "prfaas.dev/role"
    [nodes.decode-0]                # what else changes with a node, by its name
    sglang = "http://10.0.0.7:30000"
    sglang_key_file = "/etc/prfaas/sglang.key"
    pod = "decode-0"
"""

from __future__ import annotations

import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import httpx

from gateway.config import NAME, ConfigError
from gateway.conversions import ConversionLimits
from gateway.executor_kubernetes import PodLabel
from gateway.executor_sglang import SglangSwitch
from gateway.executors import RoleExecutor
from gateway.kubernetes_api import SERVICE_ACCOUNT, api_client
from scheduler.controller.settings import ControllerSettings, Mode

SGLANG_TIMEOUT_S = 60.0
_SECTIONS = {"step_s", "controller", "limits", "kubernetes", "nodes"}
_NODE = {"sglang", "sglang_key_file", "pod"}
_KUBERNETES = {"url": "https://kubernetes.default.svc", "namespace": "default", "label": "prfaas.dev/role"}


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """All of it. ``executors`` are those beside our own, by node."""

    settings: ControllerSettings
    limits: ConversionLimits = field(default_factory=ConversionLimits)
    step_s: float = 10.0
    executors: Mapping[str, tuple[RoleExecutor, ...]] = field(default_factory=dict)


def read(mode: Mode, file: Path | None) -> RebalanceConfig:
    """The mode, and what the file says. Raises ConfigError naming the field."""
    if file is None:
        return RebalanceConfig(settings=ControllerSettings(mode=mode))
    try:
        with file.open("rb") as source:
            found = tomllib.load(source)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rebalance-config {file}: {error}") from error
    try:
        _only(found, _SECTIONS, "")
        step_s = _seconds(found.get("step_s", 10.0), "step_s")
        settings = _filled(ControllerSettings(mode=mode), found.get("controller", {}), "controller", {"mode"})
        limits = _filled(ConversionLimits(), found.get("limits", {}), "limits", set())
        for each in fields(limits):
            _seconds(getattr(limits, each.name), f"limits.{each.name}")
        return RebalanceConfig(settings, limits, step_s, _executors(found))
    except (ValueError, TypeError, OSError, httpx.InvalidURL) as error:
        raise ConfigError(f"--rebalance-config {file}: {error}") from error


def _executors(found: dict[str, Any]) -> dict[str, tuple[RoleExecutor, ...]]:
    kubernetes = found.get("kubernetes", {})
    _only(kubernetes, set(_KUBERNETES), "kubernetes.")
    api: httpx.AsyncClient | None = None
    made: dict[str, tuple[RoleExecutor, ...]] = {}
    nodes = found.get("nodes", {})
    _only(nodes, None, "nodes.")
    for name, one in nodes.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"nodes.{name!r}: no node has such a name")
        _only(one, _NODE, f"nodes.{name}.")
        chain: list[RoleExecutor] = []
        if "sglang" in one:
            chain.append(SglangSwitch(_sglang(name, one)))
        if "pod" in one:
            where = {**_KUBERNETES, **kubernetes}
            api = api or _api(where["url"])
            pod = _text(one["pod"], f"nodes.{name}.pod")
            token = SERVICE_ACCOUNT / "token"
            chain.append(PodLabel(api, where["namespace"], pod, where["label"], token))
        made[name] = tuple(chain)
    return made


def _sglang(name: str, one: dict[str, Any]) -> httpx.AsyncClient:
    url = _text(one["sglang"], f"nodes.{name}.sglang")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"nodes.{name}.sglang: {url!r} is no http or https URL")
    headers = {}
    if "sglang_key_file" in one:
        key = Path(_text(one["sglang_key_file"], f"nodes.{name}.sglang_key_file")).read_text(encoding="ascii").strip()
        headers["Authorization"] = f"Bearer {key}"
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=SGLANG_TIMEOUT_S, trust_env=False)


def _api(url: str) -> httpx.AsyncClient:
    try:
        return api_client(url, SERVICE_ACCOUNT / "ca.crt")
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"kubernetes: {SERVICE_ACCOUNT}/ca.crt: {error}; run the gateway in a pod with a service account"
        ) from error


def _filled(base: Any, values: Any, section: str, but: set[str]) -> Any:
    """The defaults with the file's values, each of its default's type."""
    known = {each.name: type(getattr(base, each.name)) for each in fields(base)}
    _only(values, set(known) - but, f"{section}.")
    for name, value in values.items():
        wanted = (int, float) if known[name] is float else (known[name],)
        if type(value) not in wanted:
            raise ValueError(f"{section}.{name}: must be {known[name].__name__}, got {value!r}")
    return replace(base, **values)


def _only(values: Any, known: set[str] | None, prefix: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.rstrip('.')}: must be a table")
    if known is not None and (unknown := sorted(set(values) - known)):
        raise ValueError(f"{prefix}{unknown[0]}: unknown; known are {', '.join(sorted(known))}")


def _seconds(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= 86_400:
        raise ValueError(f"{name}: must be a number of seconds above 0 and at most 86400, got {value!r}")
    return float(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: must be a text, got {value!r}")
    return value
