"""A gateway in front of an engine that computes nothing: streams at once, then short requests one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.bench.relay import load, process
from node.bench.relay.load import Target

PATIENCE_S = 60.0
"""Beyond what a run takes by its own rate."""
WARM_UP = 50

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """``streams`` at once, of ``chunks`` at ``rate`` a second each; ``requests`` with prompts of ``words`` words."""

    streams: int = 200
    chunks: int = 300
    rate: float = 100.0
    requests: int = 2000
    words: int = 200


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; what was not is None."""

    streams: int
    chunks: int
    lost_streams: int
    truncated_streams: int
    cpu_us_per_chunk: float | None
    interchunk_p50_ms: float | None
    interchunk_p99_ms: float | None
    ttfb_p50_ms: float | None
    ttfb_p99_ms: float | None
    requests: int
    lost_requests: int
    cpu_us_per_request: float | None
    requests_per_s: float | None

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(self).items()}


async def measure(setting: Setting, say: Say) -> Figures:
    """Start both, load them, and end them. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as found:
        directory = Path(found)
        say("starting an engine that computes nothing and a gateway")
        async with (
            process.engine(directory, setting.rate) as port,
            process.gateway(directory, port) as target,
        ):
            return await loaded(target, setting, say)


async def loaded(target: Target, setting: Setting, say: Say) -> Figures:
    """The figures of whatever is there."""
    await load.requests(target, WARM_UP, setting.words, PATIENCE_S)
    streamed = asked = None
    if setting.streams:
        say(f"{setting.streams} streams of {setting.chunks} chunks at once")
        takes_s = setting.chunks / setting.rate if setting.rate else 0.0
        streamed = await load.streams(target, setting.streams, setting.chunks, 2 * takes_s + PATIENCE_S)
    if setting.requests:
        say(f"{setting.requests} short requests")
        asked = await load.requests(target, setting.requests, setting.words, PATIENCE_S)
    chunks = streamed.chunks if streamed else 0
    return Figures(
        streams=setting.streams,
        chunks=chunks,
        lost_streams=streamed.lost if streamed else 0,
        truncated_streams=streamed.truncated if streamed else 0,
        cpu_us_per_chunk=1e6 * streamed.cpu_s / chunks if streamed and chunks else None,
        interchunk_p50_ms=streamed.gap_ms(0.5) if streamed else None,
        interchunk_p99_ms=streamed.gap_ms(0.99) if streamed else None,
        ttfb_p50_ms=streamed.first_ms(0.5) if streamed else None,
        ttfb_p99_ms=streamed.first_ms(0.99) if streamed else None,
        requests=setting.requests,
        lost_requests=asked.lost if asked else 0,
        cpu_us_per_request=1e6 * asked.cpu_s / setting.requests if asked else None,
        requests_per_s=setting.requests / asked.wall_s if asked else None,
    )
