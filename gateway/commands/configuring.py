"""What the options of ``prfaas gateway`` say, as one configuration."""

from __future__ import annotations

from pathlib import Path

from gateway.commands.redis_options import advertised, redis_settings
from gateway.config import ConfigError, EngineEvents, FallbackPolicy, GatewayConfig
from kvcache.layout import DType
from scheduler.auditing import AuditValues
from scheduler.breaker import BreakerValues
from scheduler.controller.settings import Mode
from scheduler.values import PolicyValues

AUTO = "auto"
START_TOKENS = 1024
"""Where an automatic threshold begins."""


def configure(
    model: Path | None,
    model_name: str | None,
    dtype: str,
    host: str,
    port: int,
    workers: int,
    local_cluster: str,
    threshold: str,
    routing: str,
    remote_slack: float,
    price_seconds: float,
    remote_codec: str,
    fallback: str,
    state: Path | None,
    engines: Path | None,
    kv_events: tuple[str, ...],
    rebalance: str,
    rebalance_config: Path | None,
    chat_template: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    admin_key_file: Path | None,
    ca_dir: Path | None,
    node_certificate_hours: float,
    join_token_file: Path | None,
    request_timeout: float,
    queue: int,
    queue_timeout: float,
    audit_share: float,
    max_body_mib: int,
    otlp_endpoint: str | None,
    cors_origins: tuple[str, ...],
    handover: Path | None,
    drain_timeout: float,
    linger: float,
    canary_interval: float,
    breaker_failures: int,
    breaker_successes: int,
    breaker_open: float,
    redis: str | None,
    redis_password_file: Path | None,
    redis_ca: Path | None,
    redis_insecure_network: bool,
    redis_prefix: str,
    advertise: str | None,
) -> GatewayConfig:
    """What the options say. Raises ConfigError."""
    return GatewayConfig(
        model_dir=model,
        model_name=_model_name(model, model_name),
        dtype=DType(dtype),
        host=host,
        port=port,
        workers=workers,
        local_cluster=local_cluster,
        threshold_tokens=_tokens(threshold),
        threshold_auto=threshold == AUTO,
        policy=PolicyValues(
            remote_codec=remote_codec,
            observe=routing == "observe",
            slack_s=remote_slack,
            seconds_per_unit=price_seconds,
        ),
        fallback=FallbackPolicy(fallback),
        state_file=state,
        redis=redis_settings(redis, redis_password_file, redis_ca, redis_insecure_network, redis_prefix),
        advertise=advertised(advertise),
        engines_file=engines,
        kv_events=tuple(EngineEvents.parse(text) for text in kv_events),
        rebalance=Mode(rebalance),
        rebalance_file=rebalance_config,
        chat_template=chat_template,
        tls_cert=tls_cert,
        tls_key=tls_key,
        admin_key=None if admin_key_file is None else _secret(admin_key_file, "--admin-key-file"),
        join_token=None if join_token_file is None else _secret(join_token_file, "--join-token-file"),
        ca_dir=ca_dir,
        node_certificate_s=node_certificate_hours * 3600,
        request_timeout_s=request_timeout,
        queue=queue,
        queue_timeout_s=queue_timeout,
        max_body_bytes=max_body_mib << 20,
        otlp_endpoint=otlp_endpoint,
        cors_origins=cors_origins,
        handover=handover,
        drain_s=drain_timeout,
        linger_s=linger,
        canary_s=canary_interval,
        breaker=BreakerValues(breaker_failures, breaker_successes, breaker_open),
        audit=AuditValues(audit_share),
    )


def _model_name(model: Path | None, name: str | None) -> str:
    if model is None:
        if name is not None:
            raise ConfigError("--model-name: is of --model, which is missing; engines' models are named in --engines")
        return ""
    return name or model.resolve().name


def _tokens(threshold: str) -> int:
    if threshold == AUTO:
        return START_TOKENS
    if not threshold.isascii() or not threshold.isdigit():
        raise ConfigError(f"--threshold: {threshold!r} is neither a number of tokens nor {AUTO}")
    return int(threshold)


def _secret(file: Path, option: str) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file}: {error}") from error
