"""Many requests of different lengths in one decode step, without padding.

Attention layers hand lists of per-request keys and values to our attention function. Linear-attention states of all
rows live in one tensor per layer while the batch stands; each request's own state is a view of its row, so joining
and leaving copies states once and a step copies none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from engines.embedded.cache import SideBySideLayer, StateLayer, TokenLayer


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
    layers = [_join(held) for held in zip(*(cache.layers for cache in caches), strict=True)]
    return Cache(layers=layers)


def _join(
    rows: Sequence[CacheLayerMixin | LinearAttentionCacheLayerMixin],
) -> CacheLayerMixin | LinearAttentionCacheLayerMixin:
    """One layer of the batch over the same layer of every request."""
    states = [row for row in rows if isinstance(row, StateLayer)]
    held = [row.attention if isinstance(row, SideBySideLayer) else row for row in rows]
    tokens = [row for row in held if isinstance(row, TokenLayer)]
    if not states:
        return RaggedLayer(tokens)
    conv, recurrent = _join_states(states)
    return SideBySideLayer(RaggedLayer(tokens), conv, recurrent) if tokens else StateLayer(conv, recurrent)


def _join_states(rows: Sequence[StateLayer]) -> tuple[torch.Tensor, torch.Tensor]:
    conv, recurrent = (torch.cat([row.state(tensor) for row in rows]) for tensor in (0, 1))
    for i, row in enumerate(rows):
        row.conv_states[0], row.recurrent_states[0] = conv[i : i + 1], recurrent[i : i + 1]
    return conv, recurrent
