"""From what a gateway keeps and knows to what a report is made of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import isfinite

import msgspec

from gateway.decisions import Decisions
from gateway.history import ConversionRecord
from gateway.rebalancing import Rebalancing
from gateway.registry import Registry
from gateway.uncached import KeptDecision, uncached_at_home
from scheduler.report.conversions import Converted
from scheduler.report.egress import Site
from scheduler.report.latency import Goals
from scheduler.report.report import ReportInputs
from scheduler.report.requests import Served, Shipment

MOST_CONVERSIONS = 100
MOST_PROPOSALS = 20
BYTES_PER_GBIT = 1e9 / 8


class _Move(msgspec.Struct, frozen=True, gc=False):
    source_cluster: str
    wire_bytes: int = 0


class _Attempt(msgspec.Struct, frozen=True, gc=False):
    cluster: str | None = None
    prefill_s: float = 0.0
    wire_bytes: int = 0
    move: _Move | None = None


class _Usage(msgspec.Struct, frozen=True, gc=False):
    completion_tokens: int
    cached_tokens: int = 0


class Kept(msgspec.Struct, frozen=True, gc=False):
    """What of a decision record a report needs."""

    at: float
    decision: KeptDecision | None = None
    attempts: tuple[_Attempt, ...] = ()
    route: str | None = None
    fallback: bool = False
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    usage: _Usage | None = None

    def served(self) -> Served | None:
        """As a report knows a request; None for one that no decision was made about."""
        if self.decision is None:
            return None
        facts = self.decision.facts
        usage = self.usage
        return Served(
            at=self.at,
            prompt_tokens=facts.request.prompt_tokens,
            uncached_tokens=uncached_at_home(facts),
            finished=usage is not None,
            remote=(self.route or "").startswith("remote:"),
            fallback=self.fallback,
            ttft_s=self.ttft_s,
            tpot_s=1 / self.tokens_per_s if self.tokens_per_s else None,
            cached_tokens=None if usage is None else usage.cached_tokens,
            output_tokens=None if usage is None else usage.completion_tokens,
            shipments=tuple(
                shipment
                for one in self.attempts
                for shipment in _shipments(one)
                if shipment.prefill_s or shipment.wire_bytes
            ),
        )


def _shipments(attempt: _Attempt) -> Iterator[Shipment]:
    """What clusters did for it: one prefilled, and one may have sent a prefix there."""
    if attempt.cluster is not None:
        yield Shipment(attempt.cluster, attempt.prefill_s, attempt.wire_bytes)
    if attempt.move is not None:
        yield Shipment(attempt.move.source_cluster, 0.0, attempt.move.wire_bytes)


class ReportSource:
    """Reads what is there and changes nothing."""

    def __init__(self, decisions: Decisions, registry: Registry, rebalancing: Rebalancing) -> None:
        self._decisions = decisions
        self._registry = registry
        self._rebalancing = rebalancing

    def inputs(self, since: float | None, goals: Goals) -> ReportInputs:
        """Everything but the requests, as of now; on the event loop."""
        controller, history = self._rebalancing.controller, self._rebalancing.history
        return ReportInputs(
            requests=(),
            until=time.time(),
            settings=controller.settings,
            since=since,
            seen=self._rebalancing.seen,
            sites=tuple(self._sites()),
            conversions=tuple(
                _converted(one) for one in history.conversions(MOST_CONVERSIONS) if since is None or one.began >= since
            ),
            proposals=tuple(controller.proposals.all[:MOST_PROPOSALS]),
            goals=goals,
        )

    def requests(self, since: float | None, until: float) -> tuple[list[Served], bool]:
        """Those kept of a window, and whether older ones of it are gone; off the event loop."""
        kept = self._decisions.each(Kept)
        found = [served for one in kept if (served := one.served()) is not None]
        inside = [one for one in found if (since is None or one.at >= since) and one.at < until]
        full = len(kept) >= self._decisions.most_kept
        return inside, full and since is not None and len(inside) == len(found)

    def _sites(self) -> list[Site]:
        found = []
        for cluster in self._registry.clusters:
            rate = self._registry.link(cluster.name).bytes_per_s
            limit = cluster.egress_gbps * BYTES_PER_GBIT if cluster.egress_gbps else None
            known = None if rate is None or not isfinite(rate) else float(rate)
            found.append(Site(cluster.name, cluster.local, cluster.terms.prices, known, limit))
        return found


def _converted(record: ConversionRecord) -> Converted:
    gain = record.figures.get("gain")
    return Converted(
        number=record.id,
        node=record.node_id,
        role_from=record.role_from,
        role_to=record.role_to,
        began=record.began,
        ended=record.ended,
        outcome=record.phase.value,
        by=record.by,
        reason=record.reason,
        promised_gain=gain if isinstance(gain, int | float) else None,
    )
