"""The report's sections on stages, splits and traffic: what the fleet can do, and for what."""

from __future__ import annotations

from gateway.report import plots, words
from gateway.report.html import heading, paragraph, plot, table
from scheduler.operating_point import Point
from scheduler.report.capacity import CapacityView
from scheduler.report.traffic import Spread, TrafficProfile


def capacity_section(capacity: CapacityView | None) -> str:
    """Stages, and the surface of splits and thresholds."""
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
            paragraph(f"The best point there is carries {gain_range(capacity)}."),
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


def gain_range(capacity: CapacityView) -> str:
    """The gain and its interval."""
    return (
        f"{words.times(capacity.gain)} as much, between {words.times(capacity.gain_low)} and "
        f"{words.times(capacity.gain_high)} in nine of ten draws of the requests seen"
    )


def traffic_section(traffic: TrafficProfile | None, capacity: CapacityView | None) -> str:
    """How much came, and how long it was."""
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
