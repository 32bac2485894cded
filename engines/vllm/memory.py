"""The host pool as a vLLM worker uses it: rows of tokens in and out of pages, of some of a layer's heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.vllm.shards import Shard
from kvcache.blocks import Extent
from kvcache.hostpool import HostPool
from kvcache.layout import DType, TensorSpec

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


class PoolMemory:
    """The pool's bytes. A row is one token of one tensor, (heads, dim), of which a rank has the heads of its shard."""

    def __init__(self, pool: HostPool) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(pool.buffer, dtype=np.uint8)
        self.page_bytes = pool.page_bytes
        self.pages = pool.pages

    def write(self, extents: Sequence[Extent], spec: TensorSpec, shard: Shard, rows: Tensor) -> None:
        """Lay rows (tokens, shard's heads, dim), contiguous, over ``extents`` of whole rows."""
        data = rows.view(torch.uint8).numpy()
        at = 0
        for target in self._rows(extents, spec, shard):
            target[:] = data[at : at + len(target)]
            at += len(target)
        assert at == len(data), f"{len(data)} rows over extents of {at}"

    def read(self, extents: Sequence[Extent], spec: TensorSpec, shard: Shard) -> Tensor:
        """The rows in ``extents``, as a tensor (tokens, shard's heads, dim) of its own."""
        found = np.concatenate(list(self._rows(extents, spec, shard)))
        return torch.from_numpy(found).view(TORCH_DTYPES[spec.dtype])

    def _rows(self, extents: Sequence[Extent], spec: TensorSpec, shard: Shard) -> list[npt.NDArray[Any]]:
        heads, dim = spec.shape
        views = []
        for extent in extents:
            base = extent.page * self.page_bytes + extent.offset
            rows = self._bytes[base : base + extent.nbytes].reshape(-1, heads, dim * spec.dtype.itemsize)
            views.append(rows[:, shard.first : shard.first + shard.count])
        return views
