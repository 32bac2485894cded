"""Which codecs one transfer uses: of those that the request's quality allows, the ones of least predicted completion.

Both nodes must know a set of codecs for it to be considered. ``default`` is used while it or what it is compared by was
never measured: a guess replaces nothing.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from kvcache.quality import Quality
from scheduler.decision import CodecOption
from scheduler.facts import CodecFacts, DecodeNodeFacts, LinkFacts, PrefillNodeFacts
from scheduler.predict import Export, codec_s, ttft_s, wire_ratio


class CodecChoice(msgspec.Struct, frozen=True, gc=False):
    """The chosen one of ``options``, which are in the order of their names. ``codec_s`` is 0 where unmeasured."""

    chosen: CodecOption
    codec_s: float
    options: tuple[CodecOption, ...]


def choose_codec(
    default: str,
    quality: Quality,
    export: Export,
    prefill: PrefillNodeFacts,
    decode: DecodeNodeFacts,
    link: LinkFacts,
) -> CodecChoice:
    """Choose among what both nodes know. ``default`` names an exact codec that every node knows.

    Equal predictions are decided by what is sure: the default first, then the more exact, then the fewer bytes.
    """
    candidates = _candidates(default, prefill, decode)
    options = {name: _option(codec, quality, export, prefill, link) for name, codec in candidates.items()}
    chosen = options[default]
    if chosen.predicted_ttft_s is not None:
        chosen = min((o for o in options.values() if o.allowed), key=lambda option: _order(option, default))
    coding = codec_s(export.raw_bytes, candidates[chosen.name], prefill.encoders)
    return CodecChoice(chosen, coding or 0.0, tuple(options.values()))


def _candidates(default: str, prefill: PrefillNodeFacts, decode: DecodeNodeFacts) -> dict[str, CodecFacts]:
    """By name, in its order: how the prefill node encodes and the decode node decodes."""
    decoders = {codec.name: codec for codec in decode.codecs}
    found = {default: CodecFacts(default, Quality.EXACT, None, None, None)}
    for codec in prefill.codecs:
        if codec.name in decoders:
            found[codec.name] = replace(codec, decode_bytes_per_s=decoders[codec.name].decode_bytes_per_s)
        elif codec.name == default:
            found[codec.name] = replace(codec, decode_bytes_per_s=None)
    return dict(sorted(found.items()))


def _option(
    codec: CodecFacts, quality: Quality, export: Export, prefill: PrefillNodeFacts, link: LinkFacts
) -> CodecOption:
    ratio = wire_ratio(codec)
    return CodecOption(
        codec.name,
        codec.quality,
        quality.allows(codec.quality),
        None if ratio is None else round(export.raw_bytes * ratio),
        ttft_s(prefill, export, codec, link),
    )


def _order(option: CodecOption, default: str) -> tuple[float, bool, int, int, str]:
    predicted = float("inf") if option.predicted_ttft_s is None else option.predicted_ttft_s
    exactness = list(Quality).index(option.quality)
    return predicted, option.name != default, exactness, option.wire_bytes or 0, option.name
