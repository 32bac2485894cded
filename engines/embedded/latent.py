"""Multi-head latent attention (MLA): the cache holds what the model compressed, and steps attend to that directly.

A layer keeps one latent and one rotary key per token (kv_lora_rank + qk_rope_head_dim numbers); K and V of every head
are linear in the latent. transformers expands the whole context into them again for every step. Here a step multiplies
its queries into the latent's space instead and takes the values out of it afterwards (the "absorbed" form of
DeepSeek-V2, arXiv 2405.04434, section 2.1.2), so that K and V of the context never exist; wide chunks are cheaper
expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engines.embedded.attention import attend_chunk, mask

NAME = "prfaas-latent"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | list[Tensor],
    value: Tensor | list[Tensor],
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(batch, heads, n, dim) of queries against latents (``key``) and rotary keys (``value``), as ``attention.attend``.

    Those are (1, 1, tokens, rank) and (1, 1, tokens, rope) of one request, or lists of every row's where n is 1.
    Returns (batch, n, heads, v_head_dim).
    """
    mla: Any = module
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        if query.shape[2] > widest_absorbed(mla.kv_lora_rank, mla.qk_nope_head_dim, mla.v_head_dim):
            assert attention_mask is not None, "a chunk of several tokens is always masked"
            keys, values = type(mla).expand_kv(mla, key, value)
            return attend_chunk(query, keys, values, attention_mask, scaling), None
        key, value = [key], [value]
    assert isinstance(value, list)
    batch, heads, n, _ = query.shape
    up = mla.kv_b_proj.weight.view(heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
    up_key, up_value = up[:, : mla.qk_nope_head_dim], up[:, mla.qk_nope_head_dim :]
    plain, rotated = query[..., : mla.qk_nope_head_dim], query[..., mla.qk_nope_head_dim :]
    inward = plain.transpose(0, 1).reshape(heads, batch * n, -1) @ up_key
    rows = inward.view(heads, batch, n, -1).unbind(1)
    mixed = [_mix(row, rotated[i], key[i][0, 0], value[i][0, 0], attention_mask, scaling) for i, row in enumerate(rows)]
    outward = torch.cat(mixed, dim=1) @ up_value.transpose(1, 2)
    return outward.view(heads, batch, n, -1).permute(1, 2, 0, 3), None


def _mix(
    plain: Tensor, rotated: Tensor, latent: Tensor, rope: Tensor, attention_mask: Tensor | None, scaling: float
) -> Tensor:
    """Queries of one request, (heads, n, rank) and (heads, n, rope), over its tokens: (heads, n, rank)."""
    heads, n, rank = plain.shape
    scores = torch.addmm(rotated.reshape(heads * n, -1) @ rope.T, plain.reshape(heads * n, rank), latent.T)
    scores = scores.mul_(scaling).view(heads, n, -1)
    if attention_mask is not None:
        scores.add_(attention_mask[0])
    return (scores.softmax(dim=-1).view(heads * n, -1) @ latent).view(heads, n, rank)


def widest_absorbed(rank: int, nope: int, v_dim: int) -> int:
    """The most queries at once for which attending to ``rank``-wide latents takes no more products than expanding.

    Per token of context and head, expanding takes rank * (nope + v) and then n * (nope + v); latents n * 2 * rank.
    """
    saved = 2 * rank - (nope + v_dim)
    return rank * (nope + v_dim) // saved if saved > 0 else 1 << 30


def register(model: PreTrainedModel) -> str | None:
    """Let every MLA layer of ``model`` hand its latents to ``attend`` while that is selected.

    Returns the name under which it is; None where the model has no such layers.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if not layers:
        return None
    for layer in layers:
        layer.expand_kv = _kept(layer)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


def _kept(layer: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    expand = layer.expand_kv

    def expand_kv(latent: Any, rope: Any) -> tuple[Any, Any]:
        ours = layer.config._attn_implementation == NAME
        return (latent, rope) if ours else expand(latent, rope)

    return expand_kv
