"""The entropy stage: zstd, set up to be a Huffman coder of bytes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvcache.codecs.base import CodecError


class HuffmanCoder(threading.local):
    """Codes runs of bytes one thread at a time: each thread has its own contexts.

    Made for Huffman alone: a tiny table and long matches find next to nothing in exponents and quantised values, which
    is faster and also smaller than level 1's many short matches.
    """

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, data: NDArray[Any]) -> bytes:
        """One frame that states its size."""
        return self._compressor.compress(data.data)

    def decompress(self, frame: memoryview, size: int, what: str) -> NDArray[np.uint8]:
        """``size`` bytes from one frame. Its own claim is checked first, because that decides what is allocated.

        Raises CodecError, which ``what`` begins, for anything but a frame of exactly that size.
        """
        try:
            claimed = zstandard.frame_content_size(frame)
            if claimed != size:
                raise CodecError(f"{what}: a frame of {claimed} bytes, expected {size}")
            plain = self._decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"{what}: {error}") from error
        return np.frombuffer(plain, np.uint8)
