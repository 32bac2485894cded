"""The codec that changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.codecs.base import CodecError, check_size
from kvcache.layout import DType


class Raw:
    """Sends the bytes as they lie in the pool, without a copy."""

    name = "raw"
    exact = True

    def encode(self, views: Sequence[memoryview], dtype: DType, shape: tuple[int, ...]) -> Sequence[memoryview]:
        """The views themselves. Raises ValueError where they do not hold what dtype and shape say."""
        check_size(views, dtype, shape, "views")
        return views

    def decode(
        self,
        payload: Sequence[memoryview] | memoryview,
        out: Sequence[memoryview],
        dtype: DType,
        shape: tuple[int, ...],
    ) -> None:
        """Copy ``payload`` into ``out``. Raises CodecError where the sizes differ."""
        total = check_size(out, dtype, shape, "out")
        parts = [payload] if isinstance(payload, memoryview) else payload
        source = [part.cast("B") for part in parts]
        size = sum(part.nbytes for part in source)
        if size != total:
            raise CodecError(f"raw payload: {size} bytes, expected {total}")
        part, at = 0, 0
        for target in (view.cast("B") for view in out):
            done = 0
            while done < target.nbytes:
                count = min(target.nbytes - done, source[part].nbytes - at)
                target[done : done + count] = source[part][at : at + count]
                done += count
                at += count
                if at == source[part].nbytes:
                    part, at = part + 1, 0

    def max_wire_bytes(self, raw_bytes: int) -> int:
        """Exactly the raw size."""
        return raw_bytes
