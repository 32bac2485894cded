"""The codec that changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.codecs.base import CodecError, check_size, gather, scatter
from kvcache.layout import DType


class Raw:
    """Sends the bytes as they lie in the pool, without a copy."""

    name = "raw"
    exact = True
    dtypes = tuple(DType)

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
        data = gather([payload] if isinstance(payload, memoryview) else payload)
        if data.nbytes != total:
            raise CodecError(f"raw payload: {data.nbytes} bytes, expected {total}")
        scatter(data, out)

    def max_wire_bytes(self, raw_bytes: int) -> int:
        """Exactly the raw size."""
        return raw_bytes
