"""A profile as a file keeps it."""

from __future__ import annotations

import re
from math import inf, nan
from typing import Any

import msgspec
import pytest

from kvcache.quality import Quality
from scheduler.facts import CodecFacts, PrefillCurve, SizeFacts
from scheduler.measured import Handling, Measured
from tests.scheduler.profiled import measured, site


def test_what_is_written_is_read() -> None:
    codec = CodecFacts("lossless", Quality.EXACT, 0.66, 8e8, None)
    made = measured(codecs=(codec,))
    assert Measured.of(made.encoded()) == made


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("version", {"version": 2}),
        ("chunk_tokens", {"chunk_tokens": 0}),
        ("block_tokens", {"block_tokens": -64}),
        ("decode_nodes", {"decode_nodes": 0}),
        ("sizes.per_token", {"sizes": SizeFacts(-1)}),
        ("step_s", {"step_s": (0.1,)}),
        ("step_s[1]", {"step_s": (0.1, 0.0)}),
        ("step_s[0]", {"step_s": (nan, 0.1)}),
        ("codecs[0].wire_ratio", {"codecs": (CodecFacts("raw", Quality.EXACT, 0.0, None, None),)}),
        ("home.nodes", {"home": site("local", nodes=-1)}),
        ("home.prefill.token_s", {"home": site("local", prefill=PrefillCurve(0.0, -1e-3))}),
        ("home.prefill", {"home": site("local", prefill=PrefillCurve(1.0, 0.0))}),
        ("home.handling.fixed_s", {"home": site("local", handling=Handling(inf))}),
        ("clusters[0].nodes", {"clusters": (site(nodes=0),)}),
        ("clusters[0].bytes_per_s", {"clusters": (site(bytes_per_s=0.0),)}),
        ("clusters[0].rtt_s", {"clusters": (site(rtt_s=-1.0),)}),
        ("clusters[0].wire_ratio", {"clusters": (site(wire_ratio=0.0),)}),
        ("clusters: ", {"clusters": (site("local"),)}),
    ],
)
def test_a_field_that_no_stack_has_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(field)}"):
        measured(**changes).check()


@pytest.mark.parametrize(
    ("data", "named"),
    [(b"{}", "version"), (b"[]", "object"), (b"{", "truncated"), (b'{"version": "one"}', r"\$.version")],
)
def test_a_file_that_is_no_profile_is_refused(data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Measured.of(data)


def test_a_profile_of_the_wrong_shape_is_refused_where_it_is_wrong() -> None:
    plain = msgspec.to_builtins(measured())
    plain["clusters"][0]["prefill"]["token_s"] = "fast"
    with pytest.raises(ValueError, match=r"clusters\[0\]\.prefill\.token_s"):
        Measured.of(msgspec.json.encode(plain))
