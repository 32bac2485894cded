"""Gateways that use one codec for every transfer, whatever the link: for measurements of one codec at a time."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gateway.cli import main
from kvcache.quality import Quality
from scheduler import options
from scheduler.codec_choice import CodecChoice, choose_codec
from scheduler.facts import PrefillNodeFacts
from scheduler.predict import Pace


def raw() -> None:
    """``prfaas``, with ``raw`` only."""
    _only("raw")


def lossless() -> None:
    """``prfaas``, with ``lossless`` only."""
    _only("lossless")


def _only(name: str) -> None:
    def choose(
        default: str,
        quality: Quality,
        raw_bytes: int,
        prefill: PrefillNodeFacts,
        decoders: Mapping[str, float | None],
        paced: Pace | None,
    ) -> CodecChoice:
        sender = replace(prefill, codecs=tuple(codec for codec in prefill.codecs if codec.name == name))
        return choose_codec(name, quality, raw_bytes, sender, decoders, paced)

    vars(options)["choose_codec"] = choose
    main()
