"""The report as one self-contained page: no script, nothing from anywhere else, and a policy that says so."""

from __future__ import annotations

from html import escape

from gateway.report import plots, series, words
from gateway.report.html import facts, heading, listed, paragraph, plot, table
from gateway.report.style import STYLE
from gateway.report.svg import Frame
from scheduler.operating_point import Point
from scheduler.report.capacity import Advice, CapacityView
from scheduler.report.egress import ClusterUse
from scheduler.report.latency import Attainment, Latency
from scheduler.report.report import Report
from scheduler.report.traffic import Spread, TrafficProfile

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MOST_LINKS = 6
_TITLES = {
    Advice.KEEP: "Leave the split and the threshold as they are.",
    Advice.RETUNE: "Keep the split; change the threshold.",
    Advice.REBALANCE: "Change the split.",
    Advice.UNSURE: "Wait for more traffic before changing anything.",
}


def page(report: Report, model: str) -> str:
    """The whole document. ``model`` is the served model's name."""
    title = f"Rebalancing report: {model}"
    body = [
        f"<h1>{escape(title)}</h1>",
        paragraph(
            f"{words.moment(report.window.since)} to {words.moment(report.window.until)}, "
            f"{words.duration(report.window.seconds)}, {report.window.requests:,} requests. "
            f"The gateway's long-term loop is in mode {report.mode}.",
            "when",
        ),
        _verdict(report.capacity),
        _unknown(report.unknown),
        _keys(report),
        _capacity(report.capacity),
        _traffic(report.traffic, report.capacity),
        _latency(report),
        _egress(report),
        _conversions(report),
        heading("How to read this"),
        *(paragraph(note, "note") for note in report.notes),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>"
    )


def _verdict(capacity: CapacityView | None) -> str:
    if capacity is None:
        return ""
    best = ""
    if capacity.advice in (Advice.REBALANCE, Advice.RETUNE):
        point = capacity.best
        best = (
            f" {words.split(point.prefill, point.decode)} with a threshold of {words.tokens(point.threshold)} tokens "
            f"would carry {words.number(point.lambda_max, 'req/s')} instead of "
            f"{words.number(capacity.now.lambda_max)}: {_range(capacity)}."
        )
    title = f"<strong>{escape(_TITLES[capacity.advice])}</strong>"
    return f'<p class="verdict">{title}{escape(best)} {escape(capacity.why)}</p>'


def _range(capacity: CapacityView) -> str:
    return (
        f"{words.times(capacity.gain)} as much, between {words.times(capacity.gain_low)} and "
        f"{words.times(capacity.gain_high)} in nine of ten draws of the requests seen"
    )


def _unknown(sentences: tuple[str, ...]) -> str:
    if not sentences:
        return ""
    return f'<div class="unknown"><strong>What cannot be said</strong>{listed(sentences)}</div>'


def _keys(report: Report) -> str:
    entries = []
    if report.capacity is not None:
        now = report.capacity.now
        load = report.capacity.rate / now.lambda_max if now.lambda_max else float("inf")
        entries += [
            ("Offered", words.number(report.capacity.rate, "req/s"), "with something to prefill"),
            ("Capacity now", words.number(now.lambda_max, "req/s"), f"{words.share(load)} of it is used"),
            ("Full first", report.capacity.bottleneck, words.split(now.prefill, now.decode)),
        ]
    if report.latency is not None:
        entries.append(
            ("TTFT P50 / P90", f"{words.seconds(report.latency.p50)} / {words.seconds(report.latency.p90)}", "measured")
        )
    if report.slo is not None and report.slo.ttft is not None:
        entries.append(("SLO attained", words.share(_attained(report.slo)), _goal(report.slo)))
    if report.traffic is not None:
        cached = words.share(report.traffic.cached_share)
        entries.append(("Prompt tokens cached", cached, "of finished requests"))
    return facts(entries) if entries else ""


def _attained(slo: Attainment) -> float | None:
    return slo.ttft if slo.both is None else slo.both


def _goal(slo: Attainment) -> str:
    goals = slo.goals
    ttft = f"TTFT ≤ {goals.ttft_floor_s:g} s + {goals.ttft_factor:g} × T({slo.quickest or 'prefill'})"
    if goals.tpot_s is None:
        return ttft
    return f"{ttft}, TPOT ≤ {goals.tpot_factor:g} × {goals.tpot_s * 1000:g} ms"


def _capacity(capacity: CapacityView | None) -> str:
    if capacity is None:
        return ""
    stage_rows = [
        (
            stage.name,
            words.number(stage.nodes),
            words.share(stage.share),
            words.number(stage.theta),
            words.number(stage.full_at),
            words.share(stage.load),
            words.number(stage.full_then),
            words.UNKNOWN if stage.busy is None else words.share(stage.busy),
            words.UNKNOWN if stage.waiting is None else f"{stage.waiting}",
        )
        for stage in capacity.stages
    ]
    stage_columns = (
        "stage",
        "nodes",
        "of requests",
        "serves, req/s of its own",
        "full at, req/s of all",
        "used",
        "full at, as proposed",
        "busy now",
        "waiting now",
    )
    points = [("now", capacity.now), ("now, best threshold", capacity.tuned), ("best", capacity.best)]
    point_table = table(
        ("point", "split", "threshold", "Λ, mean_service", "Λ, point", "full first", "offloaded", "egress, Gbps"),
        [(name, *_point(point)) for name, point in points],
        "Operating points",
    )
    surface = table(
        ("local prefill nodes", "best threshold", "Λ, req/s"),
        [
            (str(n), words.tokens(threshold), words.number(value))
            for n, (threshold, value) in zip(capacity.surface.prefill, capacity.surface.peaks, strict=True)
        ],
        "Capacity by split",
    )
    return "".join(
        (
            heading("Stages"),
            plot(
                (plots.WIDE, plots.NARROW),
                lambda frame: plots.stages(frame, capacity),
                "Each bar ends at the rate, of all requests, at which its stage is full. What is offered must stay "
                "left of every bar's end.",
                table(stage_columns, stage_rows, "Stages"),
            ),
            heading("Split and threshold"),
            paragraph(f"The best point there is carries {_range(capacity)}."),
            plot(
                (plots.WIDE, plots.NARROW),
                lambda frame: plots.surface(frame, capacity),
                "Requests per second that the fleet can carry, for every number of local prefill nodes and every "
                "threshold. The stronger the colour, the more.",
                point_table + surface,
            ),
        )
    )


def _point(point: Point) -> tuple[str, ...]:
    return (
        words.split(point.prefill, point.decode),
        words.tokens(point.threshold),
        words.number(point.lambda_max),
        words.number(point.lambda_point),
        point.limited_by,
        words.share(point.offloaded),
        words.number(point.egress_gbps),
    )


def _traffic(traffic: TrafficProfile | None, capacity: CapacityView | None) -> str:
    if traffic is None:
        return ""
    burst = "" if traffic.burstiness is None else f", with gaps of CV {traffic.burstiness:.2f} (1 is Poisson)"
    said = (
        f"{words.number(traffic.rate, 'req/s')} arrived{burst}; {words.share(traffic.offloaded_share)} were prefilled "
        f"in another cluster, {traffic.fell_back:,} needed a second way, {traffic.unfinished:,} did not finish."
    )
    spreads = [("prompt", traffic.prompts), ("to prefill", traffic.uncached), ("answer", traffic.outputs)]
    figures = table(
        ("tokens", "requests", "mean", "P10", "P50", "P90", "P99", "largest"),
        [(name, *_spread(one)) for name, one in spreads if one is not None],
        "Lengths",
    )
    drawn = figures
    if traffic.uncached is not None:
        bars = table(
            ("more than", "up to", "requests"),
            [
                (words.tokens(low), words.tokens(high), f"{count:,}")
                for low, high, count in zip(
                    traffic.uncached.edges[:-1], traffic.uncached.edges[1:], traffic.uncached.counts, strict=True
                )
            ],
            "Lengths to prefill",
        )
        drawn = plot(
            (plots.WIDE, plots.NARROW),
            lambda frame: plots.lengths(frame, traffic, capacity),
            "Share of requests by the tokens that no local cache held. What is longer than the threshold may leave.",
            figures + bars,
        )
    return heading("Traffic") + paragraph(said) + drawn


def _spread(one: Spread) -> tuple[str, ...]:
    figures = (one.mean, one.p10, one.p50, one.p90, one.p99, one.largest)
    return (f"{one.count:,}", *(words.tokens(figure) for figure in figures))


def _latency(report: Report) -> str:
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
        parts.append(paragraph(f"{words.share(_attained(report.slo))} of requests met {_goal(report.slo)}."))
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


def _egress(report: Report) -> str:
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


def _conversions(report: Report) -> str:
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
                    words.moment(change.began),
                    change.outcome.replace("_", " "),
                    gain,
                    *stretches,
                    f"{change.by}: {change.reason}",
                )
            )
        columns = (
            "conversion",
            "began",
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
