"""``prfaas nodes routes``: the interconnect of each cluster, and what each pair's ways cost."""

from __future__ import annotations

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table, seconds, size


@click.command()
@click.option("--bytes", "nbytes", type=click.IntRange(1), help="Of the transfer.  [default: 1 GiB]")
@gateway_options
def routes(api: Api, as_json: bool, nbytes: int | None) -> None:
    """Show what carries KV between nodes, by hardware and as measured; ``*``: what the next transfer tries first."""
    found = api.call("GET", "/v1/topology" + (f"?bytes={nbytes}" if nbytes else ""))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            name,
            route["from"],
            route["to"],
            between,
            way["transport"] + ("*" if between == "host_memory" and way["transport"] == route["order"][0] else ""),
            seconds(way["cost_s"]),
            f"{size(way['bytes_per_s'])}/s" + (" assumed" if way["assumed"] else ""),
            f"{way['slowdown']:.2f}",
            way["why"],
        )
        for name, cluster in found["clusters"].items()
        for route in cluster["routes"]
        for between in ("gpus", "host_memory")
        for way in route[between] or ()
    ]
    columns = ("cluster", "from", "to", "between", "way", "cost", "rate", "slower", "why")
    print_table(columns, rows, "no prefill and decode node of one cluster have joined")
    for name, cluster in found["clusters"].items():
        for one in cluster["refused"]:
            click.echo(f"refused: {name} {one['node']}: {one['field']}: {one['reason']}")
