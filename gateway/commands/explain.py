"""``prfaas explain``: one request's decision and what came of it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from gateway.commands.client import Api, gateway_options, print_json, print_table, seconds, size

_WHY = {
    "below_threshold": "no more uncached tokens than the threshold",
    "above_threshold": "more uncached tokens than the threshold",
    "hint": "the client asked for it",
    "nothing_to_prefill": "nothing to prefill",
    "remote_slower": "above the threshold, but every remote way was predicted slower: at home it came last",
    "remote_dearer": "above the threshold, but every remote way cost more",
    "home_busy": "no more uncached tokens than the threshold, but a queue at home made another way cheaper",
    "link_congested": "above the threshold, but the way to every remote cluster was congested: at home it came last",
    "breaker_open": "above the threshold, but the circuit breaker of every remote way was open: at home it came last",
    "observe_mode": "the policy only observes: it was prefilled at home",
    "no_remote_cluster": "above the threshold, but no remote cluster could take it",
    "no_local_prefill_node": "no local prefill node was alive: the decode node prefilled in place",
    "no_way_at_home": "nothing at home could prefill it",
    "whole_request": "it asks for what only one engine alone can answer",
    "fallback": "the first way failed",
    "no_decode_node": "refused: no decode node accepted work",
    "no_prefill_node": "refused: nothing that is well could prefill it",
    "hinted_cluster_unavailable": "refused: the hinted cluster could not take it",
    "overloaded": "refused: all nodes were full",
    "residency": "refused: the key's prompts may not be where this gateway decodes",
}

_BARRED = {
    "slower_than_local": "no, slower than the local way",
    "link_congested": "no, its link is congested",
    "breaker_open": "no, its circuit breaker is open",
    "being_measured": "no, another request is measuring it",
}


@click.command()
@click.argument("request_id")
@gateway_options
def explain(api: Api, as_json: bool, request_id: str) -> None:
    """Say why request REQUEST_ID (the x-request-id of its answer) was sent where it went."""
    record = api.call("GET", f"/v1/decisions/{quote(request_id, safe='')}")
    if as_json:
        print_json(record)
        return
    _decision(record["decision"])
    for again in record.get("retried", ()):
        click.echo("\na node held less than was thought, so again:")
        _decision(again)
    if record["fallback_decision"]:
        click.echo()
        click.echo("then:")
        _decision(record["fallback_decision"])
    click.echo()
    _attempts(record["attempts"])
    waited = record.get("queue_s") or 0.0
    queued = f", {seconds(waited)} of it in the gateway's queue" if waited else ""
    click.echo(f"outcome {record['outcome']}, first token after {seconds(record['ttft_s']) or '-'}{queued}")


def _decision(decision: dict[str, Any] | None) -> None:
    if decision is None:
        click.echo("refused before it was routed")
        return
    request, chosen = decision["facts"]["request"], decision["chosen"]
    where = "nowhere" if chosen is None else chosen["cluster"] or "in place on the decode node"
    click.echo(f"{where}: {_WHY.get(decision['reason'], decision['reason'])}")
    click.echo(
        f"{request['prompt_tokens']} prompt tokens, threshold {decision['facts']['threshold_tokens']}, "
        f"{size(chosen['transfer_bytes'] if chosen else None) or 'nothing'} of KV"
    )
    rows = [
        (
            "*" if option == chosen else "",
            _way(option),
            option["prefill_node"],
            option["decode_node"],
            option["compute_increment"],
            size(option["transfer_bytes"]),
            option["codec"],
            seconds(option["predicted_ttft_s"]) or "not measured",
            *_costs(option),
            "yes" if option["allowed"] else _BARRED.get(option.get("barred"), "no"),
        )
        for option in decision["options"]
    ]
    columns = ("", "way", "prefill", "decode", "tokens", "KV", "codec", "predicted TTFT", "waiting", "price", "cost")
    print_table((*columns, "allowed"), rows, "no options")
    if decision.get("would_choose"):
        click.echo(f"it would have gone to {decision['would_choose']['cluster']}")
    codecs = [
        (
            "*" if option == chosen and codec["name"] == option["codec"] else "",
            option["cluster"],
            codec["name"],
            codec["quality"],
            size(codec["wire_bytes"]),
            seconds(codec["predicted_ttft_s"]) or "not measured",
            "yes" if codec["allowed"] else f"no, the request says {request['quality']}",
        )
        for option in decision["options"]
        for codec in option["codecs"]
    ]
    if codecs:
        click.echo()
        print_table(("", "way", "codec", "exactness", "on the wire", "predicted TTFT", "allowed"), codecs, "")


def _way(option: dict[str, Any]) -> str:
    move = option.get("move")
    moved = f", with a prefix from {move['source_node']}" if move else ""
    return (option["cluster"] or "in place") + moved


def _costs(option: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
    """What the option adds to others' waiting, its price, and its cost; older records have none of them."""
    price, cost = option.get("price"), option.get("cost_s")
    return seconds(option.get("waiting_s")), f"{price:.4g}" if price else None, seconds(cost)


def _carried(attempt: dict[str, Any]) -> str | None:
    """What carried the KV, and what had failed to; older records say neither."""
    failed = attempt.get("transports_failed")
    return attempt.get("transport", "") + (f" (not {', '.join(failed)})" if failed else "") or None


def _attempts(attempts: list[dict[str, Any]]) -> None:
    rows = [
        (
            one["attempt"],
            one["cluster"] or "in place",
            one["prefill_node"],
            one["decode_node"],
            one["outcome"],
            one["cause"],
            seconds(one.get("prefill_s")),
            one["codec"],
            size(one.get("wire_bytes")),
            _carried(one),
            seconds(one.get("transfer_s")),
            seconds(one.get("exposed_s")),
            f"{one['hidden']:.0%}" if "hidden" in one else None,
        )
        for one in attempts
    ]
    columns = (
        "attempt",
        "way",
        "prefill",
        "decode",
        "outcome",
        "cause",
        "prefill",
        "codec",
        "on the wire",
        "by",
        "transfer",
        "exposed",
        "hidden",
    )
    print_table(columns, rows, "no attempts were made")
    moves = [
        (
            one["attempt"],
            one["move"]["source_node"],
            one["prefill_node"],
            f"[{one['move']['range'][0]}, {one['move']['range'][1]})",
            one["move"]["outcome"],
            one["move"].get("cause"),
            size(one["move"].get("wire_bytes")),
            seconds(one["move"].get("seconds")),
        )
        for one in attempts
        if one.get("move")
    ]
    if moves:
        click.echo()
        print_table(("attempt", "prefix from", "to", "tokens", "outcome", "cause", "on the wire", "waited"), moves, "")
