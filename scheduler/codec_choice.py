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
    level, usual = _LEVEL[quality], None
    for codec in prefill.codecs:
        name = codec.name
        if name not in decoders and name != default:
            continue
        coding[name] = took = codec_s(raw_bytes, codec, prefill.encoders, decoders.get(name))
        option = _option(codec, _LEVEL[codec.quality] <= level, raw_bytes, took, paced)
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
            chosen = min([o for o in options if o.allowed], key=lambda option: _order(option, usual))
    return CodecChoice(chosen, coding[chosen.name] or 0.0, tuple(options))


def _option(codec: CodecFacts, allowed: bool, raw_bytes: int, took: float | None, paced: Pace | None) -> CodecOption:
    ratio, wire_bytes, predicted = wire_ratio(codec), None, None
    if ratio is not None:
        wire_bytes = round(raw_bytes * ratio)
        if paced is not None and took is not None:
            predicted = paced.ttft_s(raw_bytes * ratio, took)
    return CodecOption(codec.name, codec.quality, allowed, wire_bytes, predicted)


def _order(option: CodecOption, usual: CodecOption) -> tuple[float, bool, int, int, str]:
    predicted = float("inf") if option.predicted_ttft_s is None else option.predicted_ttft_s
    return predicted, option is not usual, _LEVEL[option.quality], option.wire_bytes or 0, option.name
