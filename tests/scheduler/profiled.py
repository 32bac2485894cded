"""A small profile, and observations of a stack that keeps to known terms."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from scheduler.facts import PrefillCurve, SizeFacts
from scheduler.fitting import Observed
from scheduler.measured import VERSION, Handling, Measured, Site, Source

CURVE = PrefillCurve(0.05, 1e-3, 1e-7)
SIZES = SizeFacts(per_token=1000, windows=((63, 2000),))
RTT_S, HANDLING_S, STEP_S = 0.004, 0.02, 0.1


def site(name: str = "far", **changes: Any) -> Site:
    made = Site(name, 1, CURVE, Handling(HANDLING_S), 1e9, RTT_S, "raw", 1.0, 9, 0.01)
    return replace(made, **changes)


def measured(**changes: Any) -> Measured:
    made = Measured(
        VERSION, "tiny", Source.PROBES, 256, 64, SIZES, (), site("local"), (site(),), 1, (STEP_S,) * 5, ((1.0, STEP_S),)
    )
    return replace(made, **changes)


def observed(at: float, tokens: int, **changes: Any) -> Observed:
    """One that nothing was in the way of, unless ``changes`` say so."""
    prefill_s = CURVE.seconds(changes.get("cached", 0), tokens)
    known: dict[str, Any] = {
        "at": at,
        "site": "far",
        "decode_node": "d",
        "cached": 0,
        "start": 0,
        "stop": tokens,
        "ttft_s": prefill_s + RTT_S + HANDLING_S + STEP_S,
        "in_place": False,
        "prefill_s": prefill_s,
        "wire_bytes": 1000 * tokens,
        "raw_bytes": 1000 * tokens,
        "codec": "raw",
        "codec_s": 0.0,
        "bytes_per_s": 1e9,
        "rtt_s": RTT_S,
        "exposed_s": 0.001,
        "quiet": True,
        "output": 1,
        "spoken_s": 0.0,
    }
    return Observed(**(known | changes))
