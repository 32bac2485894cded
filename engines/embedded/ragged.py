"""Many requests of different lengths in one decode step, without padding.

Attention layers hand lists of per-request keys and values to our attention function. Linear-attention states of all
rows live in one tensor per layer while the batch stands; each request's own state is a view of its row, so joining
and leaving copies states once and a step copies none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from engines.embedded.cache import StateLayer, TokenLayer


class RaggedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer of a batch of requests."""

    def __init__(self, rows: Sequence[TokenLayer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.is_sliding = rows[0].is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the rows exist."""

    def update(  # type: ignore[override]  # lists reach our attention function untouched
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Append one token (batch, heads, 1, dim) to every row; returns each row's (1, heads, tokens, dim)."""
        pairs = [row.update(key_states[i : i + 1], value_states[i : i + 1]) for i, row in enumerate(self.rows)]
        return [key for key, _ in pairs], [value for _, value in pairs]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A step of one token needs no mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Positions are given explicitly; this only shows that something is cached."""
        return max(row.length for row in self.rows)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


def join(caches: Sequence[Cache]) -> Cache:
    """One cache over the caches of several requests, for steps of one token. Steps advance the requests' own caches."""
    layers: list[CacheLayerMixin | LinearAttentionCacheLayerMixin] = []
    for held in zip(*(cache.layers for cache in caches), strict=True):
        tokens = [row for row in held if isinstance(row, TokenLayer)]
        states = [row for row in held if isinstance(row, StateLayer)]
        layers.append(RaggedLayer(tokens) if tokens else _join_states(states))
    return Cache(layers=layers)


def _join_states(rows: Sequence[StateLayer]) -> StateLayer:
    batch = StateLayer(torch.cat([row.state(0) for row in rows]), torch.cat([row.state(1) for row in rows]))
    for i, row in enumerate(rows):
        row.conv_states[0] = batch.state(0)[i : i + 1]
        row.recurrent_states[0] = batch.state(1)[i : i + 1]
    return batch
