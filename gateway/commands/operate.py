"""``prfaas clusters``, ``prfaas nodes`` and ``prfaas status``."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table, seconds, size
from gateway.commands.convert import convert
from gateway.commands.inputs import Finite
from gateway.commands.routes import routes
from gateway.commands.terms import terms_body, terms_options
from gateway.commands.watch import watch


@click.group()
def clusters() -> None:
    """Register, list, drain and remove prefill clusters."""


@clusters.command("register")
@click.argument("name")
@click.option(
    "--dial",
    type=click.Choice(["in", "out"]),
    default="in",
    show_default=True,
    help="Whether its nodes accept KV connections or only dial out.",
)
@click.option(
    "--egress-gbps", type=float, default=0.0, help="What all its nodes together may send KV at.  [default: no limit]"
)
@terms_options
@gateway_options
def register(api: Api, as_json: bool, name: str, dial: str, egress_gbps: float, **terms: Any) -> None:
    """Register cluster NAME and print the join token of its nodes, which is shown this once.

    With the key of an operator of NAME alone, the cluster waits for an admin: `prfaas clusters approve NAME`.
    """
    body = {"name": name, "dial": dial, "egress_gbps": egress_gbps}
    _say_with_token(api.call("POST", "/v1/clusters", body | terms_body(**terms, known={})), as_json)


@clusters.command("approve")
@click.argument("name")
@gateway_options
def approve(api: Api, as_json: bool, name: str) -> None:
    """Let the nodes of cluster NAME join, which its operator registered."""
    _say(api.call("POST", f"/v1/clusters/{quote(name, safe='')}/approve"), as_json)


@clusters.command("rotate")
@click.argument("name")
@click.option("--hours", type=Finite(0, 8760, min_open=True), default=24.0, show_default=True, help="The token's life.")
@click.option("--revoke", is_flag=True, help="Dismiss all nodes and revoke their certificates: they must join anew.")
@gateway_options
def rotate(api: Api, as_json: bool, name: str, hours: float, revoke: bool) -> None:
    """Print a new join token of cluster NAME, the local one too; the one before works no more.

    Nodes that joined stay, and renew their certificates by themselves, unless you --revoke.
    """
    body = {"hours": hours, "revoke": revoke}
    _say_with_token(api.call("POST", f"/v1/clusters/{quote(name, safe='')}/rotate", body), as_json)


@clusters.command("set")
@click.argument("name")
@terms_options
@gateway_options
def set_terms(api: Api, as_json: bool, name: str, **terms: Any) -> None:
    """Say anew where cluster NAME is, whether it is trusted, what it costs; the local one too. The rest stays."""
    path = f"/v1/clusters/{quote(name, safe='')}"
    body = terms_body(**terms, known=api.call("GET", path)["prices"])
    if not body:
        raise click.UsageError("nothing to set: give --region, --trusted, --not-trusted or a price")
    _say(api.call("PATCH", path, body), as_json)


@clusters.command("list")
@gateway_options
def list_clusters(api: Api, as_json: bool) -> None:
    """All clusters and what was learnt of the way from each."""
    found = api.call("GET", "/v1/clusters")
    if as_json:
        print_json(found)
        return
    _cluster_table(found["clusters"])


@clusters.command("show")
@click.argument("name")
@gateway_options
def show(api: Api, as_json: bool, name: str) -> None:
    """One cluster and its nodes."""
    found = api.call("GET", f"/v1/clusters/{quote(name, safe='')}")
    found["node_list"] = api.call("GET", f"/v1/clusters/{quote(name, safe='')}/nodes")["nodes"]
    if as_json:
        print_json(found)
        return
    _cluster_table([found])
    click.echo()
    _node_table(found["node_list"])


@clusters.command("drain")
@click.argument("name")
@gateway_options
def drain(api: Api, as_json: bool, name: str) -> None:
    """Send cluster NAME no new work; what it has, it finishes."""
    _say(api.call("POST", f"/v1/clusters/{quote(name, safe='')}/drain"), as_json)


@clusters.command("resume")
@click.argument("name")
@gateway_options
def resume(api: Api, as_json: bool, name: str) -> None:
    """Send a drained cluster work again."""
    _say(api.call("POST", f"/v1/clusters/{quote(name, safe='')}/resume"), as_json)


@clusters.command("remove")
@click.argument("name")
@gateway_options
def remove(api: Api, as_json: bool, name: str) -> None:
    """Dismiss the nodes of cluster NAME, let none join, and revoke its token and certificates."""
    _say(api.call("DELETE", f"/v1/clusters/{quote(name, safe='')}"), as_json)


@click.group()
def nodes() -> None:
    """List the nodes that have joined, change their roles, show the ways between them."""


nodes.add_command(convert)
nodes.add_command(routes)


@nodes.command("list")
@gateway_options
def list_nodes(api: Api, as_json: bool) -> None:
    """All joined nodes."""
    found = api.call("GET", "/v1/nodes")
    if as_json:
        print_json(found)
        return
    _node_table(found["nodes"])


@click.command()
@click.option("--watch", "watched", is_flag=True, help="Show nodes, links, queue and rates until Ctrl-C.")
@click.option(
    "--every", type=Finite(0.1, 3600), default=2.0, show_default=True, help="Seconds between two looks of --watch."
)
@gateway_options
def status(api: Api, as_json: bool, watched: bool, every: float) -> None:
    """Show whether a gateway can serve, and what it has."""
    if watched:
        if as_json:
            raise click.UsageError("--watch is for people; leave out --json, or ask again and again")
        watch(api, every)
        return
    found = api.call("GET", "/v1/status")
    found["engines"] = api.call("GET", "/v1/engines")["engines"]
    if as_json:
        print_json(found)
        return
    click.echo("ready" if found["ready"] else f"not ready: {found['reason']}")
    model = found["model"]
    if model is not None:
        click.echo(f"model {model['id']}, context {model['max_model_len']} tokens")
    click.echo(f"threshold {found['threshold_tokens']} tokens, fallback {found['fallback']}")
    queue = found["queue"]
    click.echo(f"{queue['waiting']} of at most {queue['queue']} requests wait, of {len(queue['accounts'])} tenants")
    prefixes = found["prefix_index"]
    share = "-" if prefixes["hit_share"] is None else f"{prefixes['hit_share']:.0%}"
    off = "" if prefixes["affinity"] else ", not heeded: an engine counts other prompt tokens"
    click.echo(f"prefix index {prefixes['blocks']} blocks, {size(prefixes['bytes'])}, {share} of tokens held{off}")
    click.echo(f"{found['prefill_nodes']} prefill and {found['decode_nodes']} decode nodes")
    click.echo()
    _cluster_table(found["clusters"])
    click.echo()
    _node_table(found["nodes"])
    if found["engines"]:
        click.echo()
        _engine_table(found["engines"])


def _say(cluster: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(cluster)
    else:
        click.echo(f"cluster {cluster['name']} is {cluster['state']}, dial {cluster['dial']}, {cluster['nodes']} nodes")


def _say_with_token(cluster: dict[str, Any], as_json: bool) -> None:
    """The token alone on stdout, so that it can go straight into a file."""
    if as_json:
        print_json(cluster)
        return
    hours = (cluster["join_token_until"] - time.time()) / 3600
    click.echo(f"cluster {cluster['name']} is {cluster['state']}, dial {cluster['dial']}", err=True)
    click.echo(f"its nodes may join for {hours:.3g} h: `prfaas node --join-token-file FILE`, in FILE this:", err=True)
    click.echo(cluster["join_token"])


def _cluster_table(found: list[dict[str, Any]]) -> None:
    rows = []
    for one in found:
        link = one["link"]
        rate = size(link["bytes_per_s"])
        kind = "local" if one["local"] else "remote"
        nodes = f"{one['accepting']}/{one['nodes']}"
        word = "dead" if link["dead"] else "congested" if link["congested"] else ""
        way = (rate and f"{rate}/s", seconds(link["rtt_s"]), word)
        where = (one["region"] or None, "yes" if one["trusted"] or one["local"] else "no")
        rows.append((one["name"], kind, *where, one["state"], one["dial"], nodes, *way))
    columns = ("cluster", "kind", "region", "trusted", "state", "dial", "accepting", "link", "rtt", "")
    print_table(columns, rows, "no clusters")


def _engine_table(found: list[dict[str, Any]]) -> None:
    rows = []
    for one in found:
        word = "leaving" if one["draining"] else one["trouble"]
        if word is None:
            word = "accepting" if one["accepting"] else f"breaker {one['breaker']}"
        speed, load = one["prefill_tokens_per_s"], f"{one['running']}/{one['max_running']}"
        kind = (one["model"], one["dialect"], one["role"])
        rows.append(
            (one["name"], one["cluster"], *kind, word, load, one["prefilling_tokens"], speed and f"{speed:.0f}")
        )
    columns = ("engine", "cluster", "model", "dialect", "role", "state", "running", "prefilling", "prefill tokens/s")
    print_table(columns, rows, "no engines")


def _node_table(found: list[dict[str, Any]]) -> None:
    rows = []
    for one in found:
        speed, beat = one["prefill_tokens_per_s"], one["heartbeat"] or {}
        pages = f"{beat['pages_free']}/{beat['pages_total']}" if beat else None
        cached = (
            f"{beat['pages_cached']} ({beat['cache_hits']} hits, {beat['pages_evicted']} evicted)" if beat else None
        )
        becoming = f"becoming {one['becoming']}" if one["becoming"] else ""
        word = becoming or "accepting" if becoming or one["accepting"] else beat.get("detail") or "not accepting"
        rows.append(
            (
                one["node_id"],
                one["cluster"],
                one["role"],
                word,
                one["jobs"],
                one["queued_tokens"],
                pages,
                cached,
                "; ".join(map(_tier, beat.get("tiers", ()))) or None,
                speed and f"{speed:.0f}",
            )
        )
    columns = ("node", "cluster", "role", "state", "jobs", "queued tokens", "pages free", "cached", "tiers below")
    print_table((*columns, "prefill tokens/s"), rows, "no nodes have joined")


def _tier(tier: dict[str, Any]) -> str:
    """One tier below a node's pool: what it holds, what came of it, and what is wrong with it."""
    room = f"{size(tier['used_bytes'])} of {size(tier['capacity_bytes'])}"
    state = f", {tier['state']}" if tier["state"] else ""
    return f"{tier['name']} {room} ({tier['hits']} hits, {tier['drops']} dropped{state})"
