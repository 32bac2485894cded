"""``prfaas bench kv serve`` and ``fetch``: their options. What they run is loaded when they do."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from kvcache.hosts import is_loopback
from kvcache.layout import DType

T = TypeVar("T")

_HOST = click.option("--host", default="127.0.0.1", show_default=True, help="Where KV is served.")
_TLS = click.option("--tls", is_flag=True, help="Mutual TLS, with certificates made for this run.")
_LAB = click.option(
    "--insecure-lab-network",
    "lab",
    is_flag=True,
    help="Off the loopback without TLS: everybody on that network can read and alter the KV.",
)


@click.group()
def kv() -> None:
    """Move KV from one process to another by the code that serves, without a model computing it."""


@kv.command()
@_HOST
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="0 takes a free one.")
@click.option("--bytes", "nbytes", type=click.IntRange(1, 1 << 40), required=True, help="Raw KV of one transfer.")
@_TLS
@_LAB
@click.option(
    "--credentials",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    required=True,
    help="Written for fetch, readable by you only: it lets its holder fetch.",
)
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Serve KV that this model computes, once; it is kept for the next time. Default: made-up KV.",
)
@click.option("--dtype", type=click.Choice([d.value for d in DType]), default=DType.BFLOAT16.value, show_default=True)
@click.option("--nixl", is_flag=True, help="Offer it by NIXL, too.")
def serve(
    host: str,
    port: int,
    nbytes: int,
    tls: bool,
    lab: bool,
    credentials: Path,
    model_dir: Path | None,
    dtype: str,
    nixl: bool,
) -> None:
    """Offer KV until SIGTERM or Ctrl-C.

    The largest cache of at most --bytes is offered: whole tokens, so a little less than was asked for.
    """
    _check_network(host, tls, lab)
    from node.bench.kv import run

    network = run.Network(host, port, tls, lab)
    _finish(run.serve(network, nbytes, credentials, model_dir, DType(dtype), nixl, _say))


@kv.command()
@_HOST
@click.option("--port", type=click.IntRange(1, 65535), required=True)
@click.option("--codec", required=True, help="As the gateway may choose: raw, lossless, int8, or a set of codecs.")
@_TLS
@_LAB
@click.option("--credentials", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--connections", type=click.IntRange(1, 16), default=4, show_default=True)
@click.option(
    "--transport",
    type=click.Choice(["tcp", "shm", "nixl"]),
    default="tcp",
    show_default=True,
    help="shm: both processes of one user on one host; nixl: over TCP, and serve was given --nixl.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, help="After one to warm up.")
@click.option("--timeout", "within_s", type=click.FloatRange(0.1, 3600), default=300, show_default=True, help="Of one.")
@click.option("--json", "as_json", is_flag=True)
def fetch(
    host: str,
    port: int,
    codec: str,
    tls: bool,
    lab: bool,
    credentials: Path,
    connections: int,
    transport: str,
    repeats: int,
    within_s: float,
    as_json: bool,
) -> None:
    """Fetch what `serve` offers and verify it; the figures are those of the median transfer.

    Connections are set up and used once before the clock starts. seconds run from asking to the commit, round trips
    included, granted_s as transfer_s in the node's report; goodput counts raw bytes, whatever the codec made of them.
    """
    _check_network(host, tls, lab)
    from node.bench.kv import run

    network = run.Network(host, port, tls, lab)
    figures = _finish(run.fetch(network, codec, credentials, connections, repeats, within_s, transport, _say))
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))
    if not figures["verified"]:
        raise click.ClickException("what arrived is not what was offered")


def _check_network(host: str, tls: bool, lab: bool) -> None:
    """Refuse a network that neither TLS nor the operator's word makes safe."""
    if tls and lab:
        raise click.UsageError("--insecure-lab-network: with --tls it says nothing; leave one of them out")
    if not tls and not lab and not is_loopback(host):
        raise click.UsageError(
            f"--host: {host} is not the loopback and KV would cross in the clear; "
            "give --tls, or --insecure-lab-network where nobody else is on that network"
        )


def _finish(work: Coroutine[Any, Any, T]) -> T:
    from engines.protocol import EngineLost
    from kvcache.transport import PeerRefused
    from node.bench.kv.fetch import FetchFailed

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return asyncio.run(work)
    except (EngineLost, FetchFailed, PeerRefused, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _say(text: str) -> None:
    click.echo(f"prfaas bench kv: {text}", err=True)
