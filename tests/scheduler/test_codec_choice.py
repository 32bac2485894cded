"""The codec of a transfer: the quickest that is allowed, by measured figures alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcache.quality import Quality
from scheduler import codec_choice
from scheduler.codec_choice import CodecChoice
from scheduler.facts import CodecFacts, DecodeNodeFacts, LinkFacts, PrefillCurve, PrefillNodeFacts
from scheduler.predict import pace
from tests.calm import calm
from tests.scheduler.codecs import codec_sets

KNOWN = (
    CodecFacts("raw", Quality.EXACT, 1.0, 1e10, 1e10),
    CodecFacts("lossless", Quality.EXACT, 0.7, 8e8, 2e9),
    CodecFacts("int8", Quality.NEAR, 0.45, 2e8, 2e8),
    CodecFacts("int4", Quality.COMPACT, 0.25, 2e8, 2e8),
)
MIB = 1 << 20


class Export(NamedTuple):
    start: int
    stop: int
    raw_bytes: int
    last_tokens: int = 0
    last_share: float = 0.0


def choose_codec(
    default: str,
    quality: Quality,
    export: Export,
    prefill: PrefillNodeFacts,
    decode: DecodeNodeFacts,
    link: LinkFacts,
) -> CodecChoice:
    decoders = {codec.name: codec.decode_bytes_per_s for codec in decode.codecs}
    paced = pace(prefill, link, export.start, export.stop, export.last_tokens, export.last_share)
    return codec_choice.choose_codec(default, quality, export.raw_bytes, prefill, decoders, paced)


def choose(
    rate: float | None,
    quality: Quality = Quality.EXACT,
    default: str = "lossless",
    encoders: tuple[CodecFacts, ...] = KNOWN,
    decoders: tuple[CodecFacts, ...] = KNOWN,
    speed: float = 1e6,
) -> CodecChoice:
    prefill = PrefillNodeFacts("p", 0, 1, PrefillCurve.at_rate(speed), codecs=encoders)
    decode = DecodeNodeFacts("d", 0, 1, None, codecs=decoders)
    return choose_codec(default, quality, Export(0, 1000, 100 * MIB), prefill, decode, LinkFacts(rate, 0.03))


@pytest.mark.parametrize(
    ("rate", "quality", "codec"),
    [
        (1e7, Quality.EXACT, "lossless"),
        (1e7, Quality.NEAR, "int8"),
        (1e7, Quality.COMPACT, "int4"),
        (2e8, Quality.NEAR, "lossless"),
        (2e9, Quality.EXACT, "raw"),
        (2e9, Quality.COMPACT, "raw"),
    ],
)
def test_a_narrow_link_asks_for_few_bytes_and_a_wide_one_for_a_quick_codec(
    rate: float, quality: Quality, codec: str
) -> None:
    assert choose(rate, quality).chosen.name == codec


def test_where_computing_takes_longest_whatever_is_sent_the_default_stays() -> None:
    for default in ("raw", "lossless"):
        choice = choose(1e8, Quality.COMPACT, default, speed=10.0)
        assert len({option.predicted_ttft_s for option in choice.options}) == 1
        assert choice.chosen.name == default


def test_among_equals_without_the_default_the_more_exact_is_taken_and_then_the_smaller() -> None:
    slow_default = replace(KNOWN[1], encode_bytes_per_s=1e3)
    equal = choose(1e8, Quality.COMPACT, encoders=(slow_default, *KNOWN[2:]), speed=10.0)
    assert equal.chosen.name == "int8"
    fp16 = CodecFacts("fp16", Quality.NEAR, 0.5, 2e8, 2e8)
    three = (slow_default, fp16, *KNOWN[2:])
    assert choose(1e8, Quality.COMPACT, encoders=three, decoders=three, speed=10.0).chosen.name == "int8"


@pytest.mark.parametrize("default", ["raw", "lossless"])
def test_while_nothing_is_measured_the_default_is_used(default: str) -> None:
    for choice in (choose(None, Quality.COMPACT, default), choose(1e7, default=default, encoders=(), decoders=())):
        assert choice.chosen.name == default
    assert choose(None, Quality.COMPACT, default).chosen.predicted_ttft_s is None


def test_a_measured_codec_does_not_replace_a_default_that_was_not_measured() -> None:
    unmeasured = replace(KNOWN[1], encode_bytes_per_s=None)
    assert choose(1e7, Quality.NEAR, encoders=(unmeasured, *KNOWN[2:])).chosen.name == "lossless"


def test_a_codec_that_one_of_the_nodes_does_not_have_is_no_choice() -> None:
    for encoders, decoders in ((KNOWN, KNOWN[:3]), (KNOWN[:3], KNOWN)):
        choice = choose(1e7, Quality.COMPACT, encoders=encoders, decoders=decoders)
        assert choice.chosen.name == "int8"
        assert {option.name for option in choice.options} == {"raw", "lossless", "int8"}


def test_every_alternative_is_shown_with_its_prediction_also_those_that_are_not_allowed() -> None:
    options = choose(1e7).options
    assert [(option.name, option.allowed) for option in options] == [
        ("int4", False),
        ("int8", False),
        ("lossless", True),
        ("raw", True),
    ]
    predicted = [option.predicted_ttft_s or 0.0 for option in options]
    assert predicted == sorted(predicted)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Quality, Export, PrefillNodeFacts, DecodeNodeFacts, LinkFacts]:
    export = Export(*(draw(st.integers(0, most)) for most in (10**4, 10**5, 10**9, 300)), draw(st.floats(0, 1)))
    speed = draw(st.one_of(st.none(), st.builds(PrefillCurve.at_rate, st.floats(1.0, 1e6))))
    prefill = PrefillNodeFacts("p", draw(st.integers(0, 10**4)), 1, speed, codecs=draw(codec_sets()))
    decode = DecodeNodeFacts("d", 0, 1, None, codecs=draw(codec_sets()))
    rate = draw(st.one_of(st.none(), st.floats(1e3, 1e10)))
    link = LinkFacts(rate, draw(st.one_of(st.none(), st.floats(0, 1))), draw(st.integers(0, 10**9)))
    return draw(st.sampled_from(["raw", "lossless"])), draw(st.sampled_from(Quality)), export, prefill, decode, link


@calm
@given(cases())
def test_the_quality_is_never_violated_and_nothing_that_is_allowed_is_quicker(
    case: tuple[str, Quality, Export, PrefillNodeFacts, DecodeNodeFacts, LinkFacts],
) -> None:
    default, quality, *_ = case
    choice = choose_codec(*case)
    assert choice.chosen.allowed
    assert choice.chosen.name in quality.codecs
    if choice.chosen.predicted_ttft_s is None:
        assert choice.chosen.name == default
        return
    allowed = [
        o.predicted_ttft_s for o in choice.options if o.name in quality.codecs and o.predicted_ttft_s is not None
    ]
    assert choice.chosen.predicted_ttft_s == min(allowed)


@calm
@given(cases(), st.floats(1.0, 1e4))
def test_a_wider_link_never_chooses_a_slower_option(
    case: tuple[str, Quality, Export, PrefillNodeFacts, DecodeNodeFacts, LinkFacts], wider: float
) -> None:
    *before, link = case
    narrow = choose_codec(*case).chosen.predicted_ttft_s
    if narrow is None or link.bytes_per_s is None:
        return
    wide = choose_codec(*before, replace(link, bytes_per_s=link.bytes_per_s * wider)).chosen.predicted_ttft_s
    assert wide is not None
    assert wide <= narrow


@calm
@given(cases(), st.data())
def test_the_order_in_which_nodes_name_their_codecs_changes_nothing(
    case: tuple[str, Quality, Export, PrefillNodeFacts, DecodeNodeFacts, LinkFacts], data: st.DataObject
) -> None:
    default, quality, export, prefill, decode, link = case
    turned = [replace(node, codecs=tuple(data.draw(st.permutations(node.codecs)))) for node in (prefill, decode)]
    assert choose_codec(default, quality, export, turned[0], turned[1], link) == choose_codec(*case)
