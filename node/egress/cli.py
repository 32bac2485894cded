"""``prfaas egress``: one public TLS port in front of a cluster's KV nodes."""

from __future__ import annotations

import asyncio
import logging
import signal

import click

from kvcache.control import KvAddress
from node.config import ConfigError, parse_address
from node.egress.relay import RelayLimits, SniRelay


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind.")
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="0 takes a free one.")
@click.option(
    "--route",
    "routes",
    multiple=True,
    required=True,
    metavar="NAME=HOST:PORT",
    help="A name that nodes advertise (--kv-advertise NAME:PORT), and where that node's KV port is. Repeat it.",
)
@click.option("--max-connections", type=click.IntRange(1, 1 << 20), default=1024, show_default=True)
def egress(host: str, port: int, routes: tuple[str, ...], max_connections: int) -> None:
    """Pass KV connections on by the server name in their TLS handshake, without opening them, until SIGTERM or Ctrl-C.

    Nodes behind it advertise NAME with this program's port, and hold a certificate for NAME.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        relay = SniRelay(parse_routes(routes), RelayLimits(max_connections=max_connections))
        asyncio.run(_run(relay, host, port))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"--host {host} --port {port}: {error}") from error


def parse_routes(routes: tuple[str, ...]) -> dict[str, KvAddress]:
    """NAME=HOST:PORT each; names in lower case. Raises ConfigError."""
    parsed: dict[str, KvAddress] = {}
    for route in routes:
        name, separator, address = route.partition("=")
        name = name.lower()
        if not separator or not name or not name.isascii():
            raise ConfigError(f"--route: {route!r} is not NAME=HOST:PORT")
        if name in parsed:
            raise ConfigError(f"--route: {name!r} is routed twice")
        parsed[name] = parse_address(address, "--route")
    return parsed


async def _run(relay: SniRelay, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        bound = await relay.listen(host, port)
        click.echo(f"prfaas egress: listening on {host}:{bound}", err=True)
        await stop.wait()
    finally:
        await relay.close()
