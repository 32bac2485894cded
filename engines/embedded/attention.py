"""Attention for one prefill chunk or one ragged decode step.

Query heads that share a KV head are folded into rows of one matrix, so K and V are never repeated. A step of one token
sees its whole (windowed) past and needs no mask; its kernel is the same for a lone request and for a batch. On the CPU
softmax sums in fp32 whatever its type, so asking for fp32 would only add two copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "prfaas"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | list[Tensor],
    value: Tensor | list[Tensor],
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(batch, heads, n, dim) of queries against one request's keys, or lists of every row's where n is 1.

    Returns (batch, n, heads, dim).
    """
    if isinstance(key, list):
        rows = [_one_token(query[i : i + 1], k, v, scaling) for i, (k, v) in enumerate(zip(key, value, strict=True))]
        return torch.cat(rows), None
    assert isinstance(value, Tensor)
    if query.shape[2] == 1:
        return _one_token(query, key, value, scaling), None
    assert attention_mask is not None, "a chunk of several tokens is always masked"
    return attend_chunk(query, key, value, attention_mask, scaling), None


def _one_token(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    _, heads, _, dim = query.shape
    grouped = query.reshape(1, key.shape[1], heads // key.shape[1], dim)
    return scaled_dot_product_attention(grouped, key, value, scale=scaling).reshape(1, 1, heads, -1)


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """A chunk of one request: (1, heads, n, dim) of queries, (1, KV heads, tokens, dim) to (1, n, heads, dim)."""
    _, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    scores = query.reshape(kv_heads, -1, dim) @ key[0].transpose(1, 2)
    scores = scores.mul_(scaling).view(heads, n, -1).add_(mask[0])
    weights = scores.softmax(dim=-1)
    mixed = weights.view(kv_heads, heads // kv_heads * n, -1) @ value[0]
    return mixed.view(1, heads, n, -1).transpose(1, 2).contiguous()


def mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """The causal (windowed) mask of a chunk, none for a step of one token."""
    return None if q_length == 1 else eager_mask(batch_size, q_length, kv_length, **kwargs)


def register() -> str:
    """Make the functions known to transformers; returns the name under which models select them."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME
