"""Which codecs one transfer uses: of those that the request's quality allows, the ones of least predicted completion.

Both nodes must know a set of codecs for it to be considered. ``default`` is used while it or what it is compared by was
never measured: a guess replaces nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import msgspec

from kvcache.quality import Quality
from scheduler.decision import CodecOption
from scheduler.facts import CodecFacts, PrefillNodeFacts
from scheduler.predict import Pace, codec_s, wire_ratio


class CodecChoice(msgspec.Struct, frozen=True, gc=False):
    """The chosen one of ``options``, which are in the order of their names. ``codec_s`` is 0 where unmeasured."""

    chosen: CodecOption
    codec_s: float
    options: tuple[CodecOption, ...]


_by_name = attrgetter("name")
_LEVEL = {quality: at for at, quality in enumerate(Quality)}
_ALLOWED = {quality: tuple(Quality)[: at + 1] for quality, at in _LEVEL.items()}  # hashing a member is slow


def choose_codec(
    default: str,
    quality: Quality,
    raw_bytes: int,
    prefill: PrefillNodeFacts,
    decoders: Mapping[str, float | None],
    paced: Pace | None,
) -> CodecChoice:
    """Choose among what both nodes know. ``default`` names an exact codec that every node knows.

    ``decoders`` are the rates of the decode node by codec. Equal predictions are decided by what is sure: the default
    first, then the more exact, then the fewer bytes.
    """
    options, coding = [], {}
    allowed, usual = _ALLOWED[quality], None
    for codec in prefill.codecs:
        name = codec.name
        decode = decoders.get(name)
        if decode is None and name not in decoders and name != default:
            continue
        coding[name] = took = codec_s(raw_bytes, codec, prefill.encoders, decode)
        option = _option(codec, codec.quality in allowed, raw_bytes, took, paced)
        options.append(option)
        if name == default:
            usual = option
    if usual is None:
        unknown = CodecFacts(default, Quality.EXACT, None, None, None)
        coding[default] = took = codec_s(raw_bytes, unknown, prefill.encoders, None)
        usual = _option(unknown, True, raw_bytes, took, paced)
        options.append(usual)
    chosen = usual
    if len(options) > 1:
        options.sort(key=_by_name)
        if usual.predicted_ttft_s is not None:
            least = usual.predicted_ttft_s
            for option in options:
                predicted = option.predicted_ttft_s
                if not option.allowed or predicted is None or predicted > least:
                    continue
                if predicted < least or _order(option, usual) < _order(chosen, usual):
                    chosen, least = option, predicted
    return CodecChoice(chosen, coding[chosen.name] or 0.0, tuple(options))


def _option(codec: CodecFacts, allowed: bool, raw_bytes: int, took: float | None, paced: Pace | None) -> CodecOption:
    ratio, wire_bytes, predicted = wire_ratio(codec), None, None
    if ratio is not None:
        wire_bytes = round(raw_bytes * ratio)
        if paced is not None and took is not None:
            predicted = paced.ttft_s(raw_bytes * ratio, took)
    return CodecOption(codec.name, codec.quality, allowed, wire_bytes, predicted)


def _order(option: CodecOption, usual: CodecOption) -> tuple[bool, int, int, str]:
    """Among equal predictions."""
    return option is not usual, _LEVEL[option.quality], option.wire_bytes or 0, option.name
