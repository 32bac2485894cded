"""What codecs do on a node, counted as they do it: the gateway learns ratios and speeds from these sums."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from msgspec.structs import replace

from kvcache.control import CodecWork


class CodecMeter:
    """Sums for the sets of codecs with these names; others are not counted. Safe to use from many threads."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._work = {name: CodecWork(name) for name in names}

    def encoded(self, name: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """So many raw bytes became so many encoded ones in ``seconds`` of processor time, digests included."""
        with self._lock:
            work = self._work.get(name)
            if work is not None:
                self._work[name] = replace(
                    work,
                    encoded_bytes=work.encoded_bytes + raw_bytes,
                    wire_bytes=work.wire_bytes + wire_bytes,
                    encode_s=work.encode_s + seconds,
                )

    def decoded(self, name: str, raw_bytes: int, seconds: float) -> None:
        """So many raw bytes came out in ``seconds`` of processor time, digests included."""
        with self._lock:
            work = self._work.get(name)
            if work is not None:
                self._work[name] = replace(
                    work, decoded_bytes=work.decoded_bytes + raw_bytes, decode_s=work.decode_s + seconds
                )

    def totals(self) -> tuple[CodecWork, ...]:
        """The sums of those that have done anything."""
        with self._lock:
            return tuple(work for work in self._work.values() if work.encoded_bytes or work.decoded_bytes)
