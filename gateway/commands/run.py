"""``prfaas gateway``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from gateway.commands.config_file import FiledCommand
from gateway.commands.configuring import configure
from gateway.commands.inputs import Finite
from gateway.commands.redis_options import redis_options
from gateway.config import ConfigError, FallbackPolicy, GatewayConfig
from kvcache.layout import DType
from kvcache.logs import LogFormat, set_up_logging
from kvcache.process_options import process_options
from kvcache.quality import Quality
from scheduler.controller.settings import Mode

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=FiledCommand)
@click.option(
    "--model",
    type=click.Path(file_okay=False, path_type=Path),
    help="Model directory; needed but where --engines has only engines that answer whole requests.",
)
@click.option("--model-name", help="Name that clients use; by default the directory's.")
@click.option(
    "--dtype",
    type=click.Choice([d.value for d in DType]),
    default=DType.BFLOAT16.value,
    show_default=True,
    help="Of the KV cache, as all nodes have it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes that share the port, over Redis; nodes reach each at a port of its own: --port + 1 and so on.",
)
@click.option("--local-cluster", default="local", show_default=True, help="Name of the cluster that decodes.")
@click.option(
    "--threshold",
    default="1024",
    show_default=True,
    metavar="TOKENS|auto",
    help="Uncached tokens above which a prompt is prefilled remotely; auto: found from what is seen.",
)
@click.option(
    "--routing",
    type=click.Choice(["act", "observe"]),
    default="act",
    show_default=True,
    help="observe: decide and record, but prefill at home what no hint sends away.",
)
@click.option(
    "--remote-slack",
    type=Finite(0),
    default=0.0,
    show_default=True,
    help="Seconds that a remote way may be predicted slower than the local one and still be taken.",
)
@click.option(
    "--price-seconds",
    type=Finite(0),
    default=0.0,
    show_default=True,
    help="Seconds of time to first token that one unit of the clusters' prices is worth.",
)
@click.option(
    "--fallback",
    type=click.Choice([f.value for f in FallbackPolicy]),
    default="local",
    show_default=True,
    help="When the first way fails: prefill at home, or answer 503.",
)
@click.option(
    "--remote-codec",
    type=click.Choice(Quality.EXACT.codecs),
    default="lossless",
    show_default=True,
    help="Of KV from other clusters, until another one is measured to be quicker.",
)
@click.option(
    "--handover",
    type=_FILE,
    help="UNIX socket by which this gateway takes over the port of the one that runs, and is taken over from.",
)
@click.option(
    "--state", type=_FILE, help="SQLite file for keys, clusters and decisions; without it they live in memory."
)
@click.option("--engines", type=_FILE, help="TOML file with engines that prfaas did not start: tables [[engine]].")
@click.option(
    "--kv-events",
    metavar="NODE=tcp://HOST:PORT[,tcp://HOST:PORT]",
    multiple=True,
    help="Where a node's engine publishes KV events over ZMQ, and where it replays them. May be given several times.",
)
@click.option(
    "--rebalance",
    type=click.Choice([mode.value for mode in Mode]),
    default=Mode.OBSERVE.value,
    show_default=True,
    help="The long-term loop: record what it would do about the split, ask a person, or do it.",
)
@click.option("--rebalance-config", type=_FILE, help="TOML file with its dwell, gains, deadlines and executors.")
@click.option("--chat-template", type=_FILE, help="Jinja chat template; by default the model's own.")
@click.option("--tls-cert", type=_FILE, help="PEM certificate; needed off the loopback.")
@click.option("--tls-key", type=_FILE, help="PEM private key of --tls-cert.")
@click.option(
    "--admin-key-file",
    type=_FILE,
    help="File with the secret of an admin's key (`prfaas keys generate`), which is one from the first start on.",
)
@click.option(
    "--ca",
    "ca_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of `prfaas certs create`: nodes get short-lived certificates for their cluster's join token.",
)
@click.option(
    "--node-certificate-hours",
    type=Finite(0, 2160, min_open=True),
    default=24.0,
    show_default=True,
    help="How long such a certificate holds; nodes renew theirs by themselves.",
)
@click.option(
    "--join-token-file",
    type=_FILE,
    help="One token for the nodes of all clusters, without certificates; `prfaas clusters` makes one for each.",
)
@click.option(
    "--request-timeout",
    type=Finite(0, 86400, min_open=True),
    default=1800.0,
    show_default=True,
    help="Seconds for a whole request.",
)
@click.option(
    "--queue", type=click.IntRange(0, 2048), default=1000, show_default=True, help="Requests that may wait for a node."
)
@click.option(
    "--queue-timeout",
    type=Finite(0, 86400, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that each may wait.",
)
@click.option(
    "--drain-timeout",
    type=Finite(0, 86400, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that answers at hand may take once the gateway was told to stop.",
)
@click.option(
    "--linger",
    type=Finite(0, 3600),
    default=0.0,
    show_default=True,
    help="Seconds before that in which it takes requests still and /ready says that it goes, for a balancer to hear.",
)
@click.option(
    "--canary-interval",
    type=Finite(0, 86400),
    default=30.0,
    show_default=True,
    help="Seconds that an idle node may prove nothing before a tiny generation tries it; 0: never.",
)
@click.option(
    "--breaker-failures",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Failures in a row after which a node or remote cluster gets nothing.",
)
@click.option(
    "--breaker-successes",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Successes in a row, one at a time, after which it gets everything again.",
)
@click.option(
    "--breaker-open",
    type=Finite(0, 86400, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which the first of these is let through.",
)
@click.option(
    "--audit-share",
    type=Finite(0, 1),
    default=0.01,
    show_default=True,
    help="Of prompts that remote clusters prefill, how many an idle decode node computes again and compares.",
)
@click.option("--max-body-mib", type=click.IntRange(1), default=16, show_default=True, help="Largest request body.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this origin call the API from a browser; may be repeated.  [default: none]",
)
@process_options
@redis_options
@click.pass_context
def gateway(context: click.Context, /, log_format: str, **options: Any) -> None:
    """Run a gateway: the OpenAI-compatible front door of one local cluster and any number of remote ones."""
    from gateway.serve import serve
    from gateway.workers.serving import serve_workers

    set_up_logging(LogFormat(log_format))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    command = context.command
    assert isinstance(command, FiledCommand)
    again = command.reread(context)

    def reread() -> GatewayConfig:
        params = again()
        return configure(**{name: value for name, value in params.items() if name != "log_format"})

    try:
        config = configure(**options)
        if config.workers > 1:
            context.exit(serve_workers(config, reread))
        serve(config, reread)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
