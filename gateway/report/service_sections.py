"""The report's sections on what clients and operators got: latency, egress and price, conversions."""

from __future__ import annotations

from gateway.report import series, words
from gateway.report.html import heading, paragraph, plot, table
from gateway.report.svg import Frame
from scheduler.report.egress import ClusterUse
from scheduler.report.latency import Attainment, Latency
from scheduler.report.report import Report

MOST_LINKS = 6


def latency_section(report: Report) -> str:
    """TTFT, and its goal."""
    latency = report.latency
    if latency is None:
        return ""
    rows = [
        (
            words.clock(one.at, True),
            f"{one.requests}",
            *(words.seconds(value) for value in (one.p50, one.p90, one.p99)),
        )
        for one in latency.slices
    ]
    parts = [heading("Time to first token"), paragraph(_waited(latency))]
    if report.slo is not None and report.slo.ttft is not None:
        parts.append(paragraph(f"{words.share(attained(report.slo))} of requests met {goal(report.slo)}."))
    parts.append(
        plot(
            (series.WIDE, series.NARROW),
            lambda frame: series.percentiles(frame, report.window, latency, report.conversions),
            "By the time of arrival. A line breaks where too few requests came to say; a cross is a percentile that "
            "lies among requests that had no first token; a dotted line is a node that changed its role.",
            table(("from, UTC", "requests", "P50", "P90", "P99"), rows, "TTFT over time"),
        )
    )
    return "".join(parts)


def _waited(latency: Latency) -> str:
    p99 = "" if latency.p99 is None else f", P99 {words.seconds(latency.p99)}"
    rest = f" {latency.unanswered:,} requests had none." if latency.unanswered else ""
    return (
        f"P50 {words.seconds(latency.p50)}, P90 {words.seconds(latency.p90)}{p99}, the longest "
        f"{words.seconds(latency.largest)}.{rest}"
    )


def attained(slo: Attainment) -> float | None:
    """Of all that was promised and can be judged."""
    return slo.ttft if slo.both is None else slo.both


def goal(slo: Attainment) -> str:
    """What was promised."""
    goals = slo.goals
    ttft = f"TTFT ≤ {goals.ttft_floor_s:g} s + {goals.ttft_factor:g} × T({slo.quickest or 'prefill'})"
    if goals.tpot_s is None:
        return ttft
    return f"{ttft}, TPOT ≤ {goals.tpot_factor:g} × {goals.tpot_s * 1000:g} ms"


def egress_section(report: Report) -> str:
    """What left each cluster, and what it cost."""
    found = report.egress
    remote = [cluster for cluster in found.clusters if not cluster.local]
    parts = [heading("Egress and price")]
    if not remote:
        parts.append(paragraph("No remote cluster is registered."))
    busiest = sorted(remote, key=lambda cluster: -cluster.gigabytes)[:MOST_LINKS]
    for index, cluster in enumerate(busiest if report.traffic is not None else ()):

        def draw(frame: Frame, cluster: ClusterUse = cluster, index: int = index) -> str:
            return series.link_use(frame, report.window, found, cluster, index)

        rows = [
            (words.clock(report.window.since + i * found.slice_s, True), words.number(rate))
            for i, rate in enumerate(cluster.slices)
        ]
        parts.append(
            plot(
                (series.WIDE, series.NARROW),
                draw,
                f"KV that left {cluster.name}, counted where its request arrived: short peaks may exceed the link.",
                table(("from, UTC", "Gbps"), rows, f"Egress of {cluster.name}"),
            )
        )
    columns = (
        "cluster",
        "requests",
        "prefill, s",
        "sent, GB",
        "mean, Gbps",
        "peak, Gbps",
        "link, Gbps",
        "limit, Gbps",
        "cost",
        "cost an hour",
    )
    parts.append(table(columns, [_used(cluster) for cluster in found.clusters], "What each cluster did"))
    if not any(cluster.priced for cluster in found.clusters):
        parts.append(paragraph("No cluster has prices, so nothing is said of cost.", "note"))
    return "".join(parts)


def _used(cluster: ClusterUse) -> tuple[str, ...]:
    link = words.UNKNOWN if cluster.link_gbps is None else words.number(cluster.link_gbps)
    limit = "none" if cluster.limit_gbps is None else words.number(cluster.limit_gbps)
    return (
        cluster.name + (" (at home)" if cluster.local else ""),
        f"{cluster.requests:,}",
        words.number(cluster.prefill_s),
        words.number(cluster.gigabytes),
        words.number(cluster.mean_gbps),
        words.number(cluster.peak_gbps),
        "-" if cluster.local else link,
        "-" if cluster.local else limit,
        words.number(cluster.cost) if cluster.priced else "no price",
        words.number(cluster.cost_per_hour) if cluster.priced else "no price",
    )


def conversions_section(report: Report) -> str:
    """Role changes, what came before and after, and what is proposed."""
    parts = [heading("Conversions and proposals")]
    if report.conversions:
        rows = []
        for effect in report.conversions:
            change = effect.conversion
            stretches = []
            for stretch in (effect.before, effect.after):
                stretches += (
                    ["too little traffic", ""]
                    if stretch is None
                    else [
                        f"{words.number(stretch.answered_req_s)} of {words.number(stretch.offered_req_s)}",
                        words.seconds(stretch.ttft_p90_s),
                    ]
                )
            gain = words.UNKNOWN if change.promised_gain is None else words.times(change.promised_gain)
            rows.append(
                (
                    f"{change.node} to {change.role_to}",
                    words.moment(change.began)[5:16],
                    change.outcome.replace("_", " "),
                    gain,
                    *stretches,
                    f"{change.by}: {change.reason}",
                )
            )
        columns = (
            "conversion",
            "began, UTC",
            "outcome",
            "promised",
            "req/s before",
            "P90 before",
            "req/s after",
            "P90 after",
            "why",
        )
        parts.append(table(columns, rows, "Conversions", long=(8,)))
        parts.append(
            paragraph(
                "Before and after are ten minutes each, or as far as the next conversion: answered of offered requests "
                "a second, and P90 TTFT. The traffic of the two differs as well.",
                "note",
            )
        )
    else:
        parts.append(paragraph("No node has changed its role in this window."))
    if report.proposals:
        proposed = [
            (
                f"{one.number}",
                one.verdict.value,
                words.split(one.prefill, one.decode),
                words.tokens(one.threshold),
                words.times(one.gain),
                one.reason,
            )
            for one in report.proposals
        ]
        headings = ("proposal", "verdict", "split", "threshold", "gain", "why")
        parts.append(table(headings, proposed, "Proposals of the long-term loop", long=(5,)))
    return "".join(parts)
