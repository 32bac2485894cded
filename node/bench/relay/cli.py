"""``prfaas bench relay``: its options and what it prints."""

from __future__ import annotations

import asyncio
import json

import click
from rich.console import Console


@click.command()
@click.option("--streams", type=click.IntRange(0, 20_000), default=200, show_default=True, help="Opened at once.")
@click.option("--chunks", type=click.IntRange(1, 100_000), default=300, show_default=True, help="Of each stream.")
@click.option(
    "--rate", type=click.IntRange(0, 10_000), default=100, show_default=True, help="Chunks a second; 0: all at once."
)
@click.option("--requests", type=click.IntRange(0, 1_000_000), default=2000, show_default=True, help="Short ones.")
@click.option("--words", type=click.IntRange(1, 1_000_000), default=200, show_default=True, help="Of their prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def relay(streams: int, chunks: int, rate: int, requests: int, words: int, as_json: bool) -> None:
    """Measure the gateway in front of an engine that computes nothing, with keys, admission and metrics on.

    Processor time is the gateway's own, by the kernel's accounts. First all streams are opened at once, then short
    requests are sent, 32 at a time, each on a connection of its own. Exits with 1 where a stream or a request was lost
    or cut short.
    """
    import uvloop

    from node.bench.relay.measure import Setting, measure
    from node.bench.relay.process import BenchError

    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    setting = Setting(streams, chunks, rate, requests, words)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(measure(setting, say))
    except (BenchError, OSError) as error:
        raise click.ClickException(str(error)) from error
    figures = found.plain()
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            click.echo(f"{name.replace('_', ' '):22} {'' if value is None else value}")
    if found.lost_streams or found.truncated_streams or found.lost_requests:
        raise click.exceptions.Exit(1)
