"""Loading a model that is known to continue a chunked prefill correctly, and running its body and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from engines.embedded import attention, latent
from engines.embedded.cache import TORCH_DTYPES
from engines.spec import EngineSpec
from kvcache.layout import GroupKind, KVLayout
from kvcache.layout_configs import layout_from_config

LayerHook = Callable[[int], None]


class LanguageModel:
    """Token ids in, hidden states and logits out. ``after_layer`` is called with each decoder layer's index."""

    def __init__(self, model: PreTrainedModel, layout: KVLayout) -> None:
        """Wrap a causal language model whose attention is ours; ``layout`` is that of its cache."""
        self.wrapped = model
        body = model.model
        self.body = getattr(body, "language_model", body)
        self.head = model.lm_head
        self.layout = layout
        self.config = model.config.get_text_config(decoder=True)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.multiplier = getattr(self.config, "lm_head_multiplier", 1.0) / getattr(self.config, "logits_scaling", 1.0)
        self.after_layer: LayerHook | None = None
        for index, layer in enumerate(self.body.layers):
            layer.register_forward_hook(self._hook(index))

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return int(self.head.weight.shape[0])

    @property
    def context_tokens(self) -> int:
        """The longest sequence that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the generation config says or else the model's own config."""
        generation = self.wrapped.generation_config
        ends = generation.eos_token_id if generation is not None else None
        ends = self.config.eos_token_id if ends is None else ends
        return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)

    def hidden(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Run (batch, n) tokens at (batch, n) positions through the body; (batch, n, hidden)."""
        output = self.body(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(batch, hidden) to (batch, vocabulary) in fp32."""
        logits: Tensor = self.head(hidden).float() * self.multiplier
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Inside, the model runs transformers' own attention."""
        ours = self.config._attn_implementation
        self.wrapped.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            self.wrapped.set_attn_implementation(ours)

    def _hook(self, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self.after_layer is not None:
                self.after_layer(index)

        return hook


def load(spec: EngineSpec, config: Mapping[str, Any]) -> LanguageModel:
    """Load the model of ``spec``, whose parsed config.json is ``config`` and is of an allowed architecture.

    Raises ValueError for what is not supported, naming it and the cure.
    """
    if spec.dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype {spec.dtype} is not supported by the embedded engine: use bfloat16 or float32")
    layout = layout_from_config(config, spec.dtype)
    if any(g.kind is GroupKind.STATE for g in layout.groups) and spec.chunk_tokens % 64:
        raise ValueError(f"chunk_tokens must be a multiple of 64 for {config['model_type']}, got {spec.chunk_tokens}")
    model = _weights(spec)
    _check_time_steps(model)
    _check_layout(layout, model)
    model.set_attn_implementation(latent.register(model) or attention.register())
    return LanguageModel(model, layout)


def _weights(spec: EngineSpec) -> PreTrainedModel:
    """The model with every weight from its files: transformers itself makes up what it does not find."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            spec.model_dir,
            dtype=TORCH_DTYPES[spec.dtype],
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers fails in many ways, and at length
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the weights do not load: {reason}; fetch the model again") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ValueError(f"the weights lack {missing[0]} and {len(missing) - 1} more; fetch the model again")
    return model


def _check_layout(layout: KVLayout, model: PreTrainedModel) -> None:
    """Run a few tokens with transformers' own cache and compare what it holds with the layout."""
    cache = DynamicCache(config=model.config)
    getattr(model.model, "language_model", model.model)(
        input_ids=torch.zeros((1, 3), dtype=torch.long), past_key_values=cache, use_cache=True
    )
    wanted = {
        (layer.index, group.kind is GroupKind.STATE): (
            [(spec.shape, TORCH_DTYPES[spec.dtype]) for spec in layer.tensors],
            group.window,
        )
        for group in layout.groups
        for layer in group.layers
    }
    found: dict[tuple[int, bool], Any] = {}
    held: Any
    for index, held in enumerate(cache.layers):
        if getattr(held, "keys", None) is not None:
            tensors = [((t.shape[1], t.shape[3]), t.dtype) for t in (held.keys, held.values)]
            found[index, False] = tensors, getattr(held, "sliding_window", None)
        if isinstance(held, LinearAttentionCacheLayerMixin) and held.recurrent_states[0] is not None:
            states: Any = (held.conv_states[0], held.recurrent_states[0])
            found[index, True] = [(tuple(state.shape[1:]), state.dtype) for state in states], None
    for index, state in sorted(wanted.keys() | found.keys()):
        says, holds = wanted.get((index, state)), found.get((index, state))
        if says != holds:
            kind = "state" if state else "attention"
            raise ValueError(f"layer {index}: the layout says {says} for its {kind}; the model {holds}")


def _check_time_steps(model: PreTrainedModel) -> None:
    """Refuse Mamba layers that bound their time steps: transformers does so in chunks, not in steps of one token."""
    for name, module in model.named_modules():
        limit = getattr(module, "time_step_limit", (0.0, math.inf))
        if tuple(limit or ()) != (0.0, math.inf):
            raise ValueError(f"{name}: time_step_limit {limit} is not supported, because single tokens would ignore it")
