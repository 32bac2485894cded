"""What the codecs of one node were seen to do: how far they compress, and how fast.

What real transfers showed fades, by half in ``HALF_LIFE_S``. What the node measured of itself when it started counts as
``START_BYTES`` and does not fade, so that a set of codecs that went badly is tried again. Time is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.quality import Quality
from scheduler.facts import CodecFacts

HALF_LIFE_S = 300.0
START_BYTES = float(1 << 20)
KEPT_S = 1.0
"""What a decision may know is worked out anew after so long, in which hardly anything fades, or when there is more."""
MAX_BYTES_PER_S = 1e15
"""No processor encodes or decodes more: what says otherwise is no measurement."""
MOST_EXPANSION = 2.0
"""No codec makes more than this of what it encodes: what says otherwise is no measurement."""


@dataclass(frozen=True, slots=True)
class Work:
    """``raw_bytes`` encoded or decoded in ``seconds`` of processor time; ``wire_bytes`` is what they are encoded."""

    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    seconds: float = 0.0

    @property
    def telling(self) -> bool:
        """Whether ratio and rate can be taken from it."""
        rate = self.raw_bytes / self.seconds if self.seconds > 0 else 0.0
        return 0 < rate <= MAX_BYTES_PER_S and 0 < self.wire_bytes <= MOST_EXPANSION * self.raw_bytes

    def times(self, factor: float) -> Work:
        """A share of it."""
        return Work(self.raw_bytes * factor, self.wire_bytes * factor, self.seconds * factor)

    def plus(self, other: Work) -> Work:
        """Both together."""
        return Work(self.raw_bytes + other.raw_bytes, self.wire_bytes + other.wire_bytes, self.seconds + other.seconds)


class CodecSpeeds:
    """One node's codecs, by the names of their sets."""

    def __init__(self) -> None:
        self._encoders: dict[str, _Learnt] = {}
        self._decoders: dict[str, _Learnt] = {}
        self._qualities: dict[str, Quality] = {}
        self._kept: tuple[float, tuple[CodecFacts, ...]] | None = None

    def know(self, name: str, quality: Quality, encode: Work, decode: Work) -> None:
        """A set of codecs that the node has, and what it measured of it when it started."""
        self._kept = None
        self._qualities[name] = quality
        self._encoders[name] = _Learnt(encode)
        self._decoders[name] = _Learnt(decode)

    def count(self, name: str, encode: Work, decode: Work, now: float) -> None:
        """What real transfers have shown of it, as sums since the node started: only their growth is learnt from.

        Of a set that the node does not have nothing is learnt.
        """
        if name in self._qualities:
            self._kept = None
            self._encoders[name].count(encode, now)
            self._decoders[name].count(decode, now)

    def facts(self, now: float) -> tuple[CodecFacts, ...]:
        """What a decision may know, in the order of the names."""
        if self._kept is None or not 0 <= now - self._kept[0] < KEPT_S:
            self._kept = now, tuple(self._facts(name, now) for name in sorted(self._qualities))
        return self._kept[1]

    def _facts(self, name: str, now: float) -> CodecFacts:
        encode, decode = self._encoders[name].at(now), self._decoders[name].at(now)
        return CodecFacts(
            name,
            self._qualities[name],
            encode.wire_bytes / encode.raw_bytes if encode.telling else None,
            encode.raw_bytes / encode.seconds if encode.telling else None,
            decode.raw_bytes / decode.seconds if decode.telling else None,
        )


class _Learnt:
    """Fading sums of one direction, on top of the measurement at the start."""

    def __init__(self, start: Work) -> None:
        self._start = start.times(START_BYTES / start.raw_bytes) if start.telling else Work()
        self._seen = Work()
        self._counted = Work()
        self._at = 0.0

    def count(self, total: Work, now: float) -> None:
        grown, self._counted = total.plus(self._counted.times(-1.0)), total
        if grown.telling:
            self._seen = self._faded(now).plus(grown)
            self._at = now

    def at(self, now: float) -> Work:
        return self._faded(now).plus(self._start)

    def _faded(self, now: float) -> Work:
        return self._seen.times(0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S))
