"""The report as one self-contained page: no script, nothing from anywhere else, and a policy that says so."""

from __future__ import annotations

from html import escape

from gateway.report import words
from gateway.report.capacity_sections import capacity_section, gain_range, traffic_section
from gateway.report.html import facts, heading, listed, paragraph
from gateway.report.service_sections import attained, conversions_section, egress_section, goal, latency_section
from gateway.report.style import STYLE
from scheduler.report.capacity import Advice, CapacityView
from scheduler.report.report import Report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
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
        capacity_section(report.capacity),
        traffic_section(report.traffic, report.capacity),
        latency_section(report),
        egress_section(report),
        conversions_section(report),
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
            f"{words.number(capacity.now.lambda_max)}: {gain_range(capacity)}."
        )
    title = f"<strong>{escape(_TITLES[capacity.advice])}</strong>"
    return f'<p class="verdict">{title}{escape(best)} {escape(capacity.why)}</p>'


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
        entries.append(("SLO attained", words.share(attained(report.slo)), goal(report.slo)))
    if report.traffic is not None:
        cached = words.share(report.traffic.cached_share)
        entries.append(("Prompt tokens cached", cached, "of finished requests"))
    return facts(entries) if entries else ""
