"""Where the requests of ``prfaas simulate`` come from, and which of its options are of which source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import click
from click.core import ParameterSource

from gateway.commands.inputs import Unusable
from scheduler.case_study import LENGTHS, OUTPUT_TOKENS
from scheduler.lengths import LengthDistribution
from scheduler.simulator.arrivals import Arrivals, synthetic
from scheduler.simulator.figures import LEAST_REQUESTS, LEAST_STRATIFIED
from scheduler.simulator.orders import Order
from scheduler.simulator.study import lengths_of
from scheduler.simulator.traces.formats import FORMATS
from scheduler.simulator.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from: a trace that is repeated for every seed, or draws."""

    trace: Traffic | None
    lengths: LengthDistribution
    output_tokens: float
    draw: Callable[[int], Traffic]
    enough: bool


def source_of(given: dict[str, Any]) -> Source:
    """The source that the options ask for. Raises UsageError, Unusable and ValueError."""
    if given["trace"] is not None:
        traffic = _traced(given["trace"], given["trace_format"])
        spread_s, speed = given["spread_s"], given["speed"]
        if given["rate"]:
            speed = given["rate"] / traffic.rate

        def replayed(seed: int) -> Traffic:
            return (traffic.spread(spread_s, seed) if spread_s else traffic).faster(speed)

        enough = len(traffic) >= LEAST_REQUESTS
        return Source(traffic, lengths_of(traffic), float(traffic.output_tokens.mean()), replayed, enough)
    if not given["rate"]:
        raise click.UsageError("--rate is missing: requests per second, unless --trace brings its own")
    stratified = given["lengths"] == "stratified"
    cv = given["cv"] if given["arrivals"] == "bursty" else 1.0
    arrivals = Arrivals(given["requests"], given["rate"], cv, stratified)
    enough = given["requests"] >= (LEAST_STRATIFIED if stratified else LEAST_REQUESTS)
    return Source(None, LENGTHS, OUTPUT_TOKENS, lambda seed: synthetic(arrivals, LENGTHS, OUTPUT_TOKENS, seed), enough)


def check_together(given: dict[str, Any]) -> None:
    """Refuse what was said and would change nothing. Raises UsageError."""
    context = click.get_current_context()
    trace, measured = given["trace"] is not None, given["profile"] is not None
    fractional = given["roles"] == "fractional"
    for names, holds, why in (
        (("trace_format", "speed", "spread_s", "store", "store_gb"), trace, "goes with --trace"),
        (("requests", "arrivals", "lengths"), not trace, "is of drawn requests; a --trace has its own"),
        (("cv",), not trace and given["arrivals"] == "bursty", "goes with --arrivals bursty"),
        (("slack",), given["order"] == Order.AGED.value, "goes with --order aged"),
        (("tpot_budget",), fractional, "goes with --roles fractional"),
        (("prefill",), not fractional, "goes with --roles integer"),
        (("preset", "link_gbps"), not measured, "is of a preset; a --profile has its own"),
        (("rate",), not (trace and _said(context, "speed")), "and --speed both say how fast the --trace comes"),
    ):
        for name in names:
            if not holds and _said(context, name):
                option = "format" if name == "trace_format" else name.replace("_", "-")
                raise click.UsageError(f"--{option} {why}")


def _said(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _traced(lines: TextIO, form: str) -> Traffic:
    """The requests of a file. Raises Unusable naming it and the line."""
    try:
        return FORMATS[form](lines)
    except UnicodeDecodeError:
        raise Unusable(f"--trace {lines.name}: it is no UTF-8 text") from None
    except OSError as error:
        raise Unusable(f"--trace {lines.name}: {error.strerror}") from error
    except ValueError as error:
        raise Unusable(f"--trace {lines.name}, read as {form}: {error}") from error
