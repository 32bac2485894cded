"""From decision records to what a profile is fitted to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from scheduler.decision import Option
from scheduler.facts import CodecFacts, Facts
from scheduler.fitting import Observed, fit_site, step_times, steps
from scheduler.measured import VERSION, Measured, Site, Source

DEFAULT_BATCH = 16
"""Streams of a decode node that does not say how many it speaks at once."""


class LogUnreadable(Exception):
    """A file is not a decision log; the text names the line and the field."""


class _Decided(msgspec.Struct, frozen=True):
    """What of a decision is needed."""

    chosen: Option | None
    facts: Facts


@dataclass(frozen=True, slots=True)
class Stack:
    """What records do not say."""

    model: str
    block_tokens: int
    batch: int


def records_in(text: str) -> list[dict[str, Any]]:
    """The records of a log: one JSON object a line, or an answer of /v1/decisions. Raises LogUnreadable."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("decisions"), list):
        found = whole["decisions"]
    else:
        found = [whole] if isinstance(whole, dict) else [_line(n, line) for n, line in enumerate(text.splitlines(), 1)]
    records = [record for record in found if record is not None]
    if not records or not all(isinstance(record, dict) and "attempts" in record for record in records):
        raise LogUnreadable("no decision records; save them with prfaas explain or from /v1/decisions")
    return records


def _line(number: int, line: str) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        found = json.loads(line)
    except ValueError as error:
        raise LogUnreadable(f"line {number}: {error}") from error
    if not isinstance(found, dict):
        raise LogUnreadable(f"line {number}: a decision record is an object, this is a {type(found).__name__}")
    return found


def observed(records: Iterable[dict[str, Any]], extra_s: Mapping[str, float] | None = None) -> list[Observed]:
    """Requests that their first way answered whole, oldest first.

    ``extra_s`` is how much later than the gateway's own word the client saw the first token, by request id. Raises
    LogUnreadable naming the field that a record of this version has.
    """
    found = []
    for record in records:
        if record.get("outcome") != "finished" or record.get("fallback") or record.get("ttft_s") is None:
            continue
        try:
            found.append(_observed(record, (extra_s or {}).get(record["request_id"], 0.0)))
        except (KeyError, TypeError, IndexError, msgspec.ValidationError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise LogUnreadable(f"record {record.get('id')}: {what}") from error
    return sorted(found, key=lambda one: one.at)


def _observed(record: dict[str, Any], extra_s: float) -> Observed:
    decision = msgspec.convert(record["decision"], _Decided)
    option, attempt, facts = decision.chosen, record["attempts"][-1], decision.facts
    if option is None:
        raise TypeError("decision.chosen is nothing, though the request was answered")
    home = next(cluster for cluster in facts.clusters if cluster.local)
    cluster = next((cluster for cluster in facts.clusters if cluster.name == option.cluster), home)
    node = next((node for node in cluster.nodes if node.node_id == option.prefill_node), None)
    decode = next(node for node in facts.decode_nodes if node.node_id == option.decode_node)
    output = int(record["usage"]["completion_tokens"])
    rate, in_place = record["tokens_per_s"], option.prefill_node is None
    return Observed(
        at=record["at"],
        site=cluster.name,
        decode_node=option.decode_node,
        cached=option.cached_tokens if in_place else int(attempt.get("cached_tokens", 0)),
        start=option.start,
        stop=facts.request.prompt_tokens - 1,
        ttft_s=record["ttft_s"] - record.get("queue_s", 0.0) + extra_s,
        in_place=in_place,
        prefill_s=attempt.get("prefill_s"),
        wire_bytes=int(attempt.get("wire_bytes", 0)),
        raw_bytes=int(attempt.get("raw_bytes", 0)),
        codec=attempt["codec"] or "",
        codec_s=option.codec_s,
        bytes_per_s=cluster.link.bytes_per_s,
        rtt_s=cluster.link.rtt_s,
        exposed_s=float(attempt.get("exposed_s") or 0.0),
        quiet=decode.running == 0 and (node is None or node.queued_tokens == 0),
        output=output,
        spoken_s=(output - 1) / rate if rate else 0.0,
    )


def common_codecs(facts: Facts) -> tuple[CodecFacts, ...]:
    """What every node can do, at the rates of the slowest."""
    encoders = [node.codecs for cluster in facts.clusters for node in cluster.nodes]
    decoders = [node.codecs for node in facts.decode_nodes]
    held = [{codec.name: codec for codec in codecs} for codecs in (*encoders, *decoders)]
    found = []
    for name in sorted(set[str]().union(*held)):
        if not all(name in one for one in held):
            continue
        encode = [one[name].encode_bytes_per_s for one in held[: len(encoders)]]
        decode = [one[name].decode_bytes_per_s for one in held[len(encoders) :]]
        ratios = [one[name].wire_ratio for one in held]
        known = [[value for value in values if value] for values in (encode, decode, ratios)]
        found.append(
            CodecFacts(
                name,
                held[0][name].quality,
                max(known[2], default=None),
                min(known[0], default=None),
                min(known[1], default=None),
            )
        )
    return tuple(found)


def profile(
    records: list[dict[str, Any]], stack: Stack, source: Source, extra_s: Mapping[str, float] | None = None
) -> Measured:
    """The profile that records make. Raises ValueError naming what they do not say, and LogUnreadable."""
    seen = observed(records, extra_s)
    if not seen:
        raise ValueError("records: none of them is of a request that was answered by its first way")
    newest = max((r for r in records if r.get("decision")), key=lambda record: record["at"])
    facts = msgspec.convert(newest["decision"], _Decided).facts
    sizes, chunk = facts.request.sizes, facts.request.chunk_tokens
    times = step_times(seen)
    step_s = steps(times, stack.batch)
    sites: list[Site] = []
    for cluster in facts.clusters:
        here = [one for one in seen if one.site == cluster.name]
        if cluster.local or cluster.nodes:
            sites.append(fit_site(cluster.name, len(cluster.nodes), here, sizes, chunk, step_s[1]))
    names = [cluster.name for cluster in facts.clusters if cluster.local]
    made = Measured(
        version=VERSION,
        model=stack.model,
        source=source,
        chunk_tokens=chunk,
        block_tokens=stack.block_tokens,
        sizes=sizes,
        codecs=common_codecs(facts),
        home=next(site for site in sites if site.name in names),
        clusters=tuple(site for site in sites if site.name not in names),
        decode_nodes=len(facts.decode_nodes),
        step_s=step_s,
        steps_seen=tuple(times),
    )
    made.check()
    return made
