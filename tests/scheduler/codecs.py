"""What nodes may say of their codecs, for tests that draw it."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcache.quality import Quality
from scheduler.facts import CodecFacts

QUALITIES = {
    "raw": Quality.EXACT,
    "lossless": Quality.EXACT,
    "fp16": Quality.NEAR,
    "int8": Quality.NEAR,
    "int4": Quality.COMPACT,
}
_rates = st.one_of(st.none(), st.floats(1e3, 1e10))


@st.composite
def codec_sets(draw: st.DrawFn) -> tuple[CodecFacts, ...]:
    """Some codecs, each once, with figures that may be missing."""
    names = draw(st.lists(st.sampled_from(sorted(QUALITIES)), unique=True))
    ratios = st.one_of(st.none(), st.floats(0.01, 1.5))
    return tuple(CodecFacts(name, QUALITIES[name], draw(ratios), draw(_rates), draw(_rates)) for name in names)
