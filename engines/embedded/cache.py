"""The engine's own cache layers: token-major buffers, so that a page of the pool is a plain copy of their rows.

They follow transformers' layer interface and are built from the KV layout alone. Where transformers' own layers copy
the whole context to append one token, these grow by a factor; windows move their last W - 1 tokens to the front only
when their buffer is full.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from kvcache.layout import DType, GroupKind, KVLayout, TensorSpec

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


class TokenLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one request in one attention layer; ``window`` W keeps the last W - 1 tokens and ``slack``.

    ``length`` counts all tokens seen; buffers hold rows for tokens [``base``, ``length``), shape (rows, heads, dim).
    """

    def __init__(
        self, key: TensorSpec, value: TensorSpec, window: int | None, expected: int = 0, slack: int = 0
    ) -> None:
        """``expected`` tokens will come: without a window, room for them is set aside at once.

        With one, the window of any position up to ``slack`` tokens back can be had, too.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = window is not None
        self.window = window
        self.slack = slack
        self.base = 0
        self.length = 0
        rows = expected if window is None else 0
        self._buffers = [torch.empty((rows, *spec.shape), dtype=TORCH_DTYPES[spec.dtype]) for spec in (key, value)]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: shapes are known from the layout."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (1, heads, n, dim) and return all that the n new tokens may see, as (1, heads, tokens, dim) views."""
        first = self._oldest()
        self.append(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        key, value = (buffer[first - self.base : self.length - self.base] for buffer in self._buffers)
        return key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append (n, heads, dim)."""
        begin, end = self._reserve(key.shape[0])
        self._buffers[0][begin:end].copy_(key)
        self._buffers[1][begin:end].copy_(value)

    def tokens(self, tensor: int, start: int, stop: int) -> torch.Tensor:
        """Rows of tokens [start, stop), contiguous, shape (stop - start, heads, dim); tensor 0 is K, 1 is V."""
        assert self.base <= start <= stop <= self.length, f"[{start}, {stop}) not in [{self.base}, {self.length})"
        return self._buffers[tensor][start - self.base : stop - self.base]

    def restore(self, start: int, stop: int) -> None:
        """Make an empty layer hold tokens [start, stop), to be filled through ``tokens``."""
        assert self.length == 0, "only an empty layer can be restored"
        self.base = self.length = start
        self._reserve(stop - start)

    def fork(self) -> TokenLayer:
        """One that holds the same and goes on apart."""
        twin = copy(self)
        twin._buffers = [buffer.clone() for buffer in self._buffers]
        return twin

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of what ``update`` will return for ``query_length`` new tokens."""
        first = self._oldest()
        return self.length - first + query_length, first

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def _oldest(self) -> int:
        """The oldest token that the next one may see."""
        return self.base if self.window is None else max(self.base, self.length - (self.window - 1))

    def _reserve(self, count: int) -> tuple[int, int]:
        """Make room for ``count`` more tokens and count them in; returns their rows."""
        begin = self.length - self.base
        if begin + count > self._buffers[0].shape[0]:
            oldest = max(self.base, self._oldest() - self.slack)
            keep = self.length - oldest
            spare = (keep + count) // 2 if self.window is None else self.window
            grown = [b.new_empty((keep + count + spare, *b.shape[1:])) for b in self._buffers]
            for new, old in zip(grown, self._buffers, strict=True):
                new[:keep].copy_(old[begin - keep : begin])
            self._buffers, self.base, begin = grown, oldest, keep
        self.length += count
        return begin, begin + count


class StateLayer(LinearAttentionLayer):
    """Convolution and recurrent state of one request in one linear-attention layer; starts from zeros.

    A zero state that counts as a previous one gives what no state gives, and makes the first step like any other.
    """

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        super().__init__()
        self.conv_states[0], self.recurrent_states[0] = conv, recurrent
        self.conv_kernel_size[0] = conv.shape[-1]
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True

    @classmethod
    def zeros(cls, conv: TensorSpec, recurrent: TensorSpec) -> StateLayer:
        """The state before the first token."""
        conv_zeros, recurrent_zeros = (
            torch.zeros((1, *spec.shape), dtype=TORCH_DTYPES[spec.dtype]) for spec in (conv, recurrent)
        )
        return cls(conv_zeros, recurrent_zeros)

    def state(self, tensor: int) -> torch.Tensor:
        """(1, *shape in the layout); tensor 0 is the convolution's, 1 the recurrent one. Steps change it in place."""
        held = (self.conv_states, self.recurrent_states)[tensor][0]
        assert held is not None
        return held


class SideBySideLayer(StateLayer, CacheLayerMixin):  # type: ignore[no-untyped-call, override]
    """A layer that holds both (falcon_h1): to the model it is one object, here it is a state that knows its attention.

    ``attention`` is a TokenLayer, or a batch's RaggedLayer.
    """

    def __init__(self, attention: Any, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        super().__init__(conv, recurrent)
        self.attention = attention
        self.is_sliding = attention.is_sliding
        self.is_initialized = True

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """The attention's."""
        return self.attention.update(*args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The attention's."""
        return self.attention.get_mask_sizes(query_length)  # type: ignore[no-any-return]

    def get_seq_length(self) -> int:
        """The attention's."""
        return self.attention.get_seq_length()  # type: ignore[no-any-return]


def fork(cache: Cache) -> Cache:
    """The same cache of one request once more: what is added to one is not in the other."""
    layers: list[CacheLayerMixin | LinearAttentionCacheLayerMixin] = []
    for layer in cache.layers:
        if isinstance(layer, SideBySideLayer):
            layers.append(SideBySideLayer(layer.attention.fork(), layer.state(0).clone(), layer.state(1).clone()))
        elif isinstance(layer, StateLayer):
            layers.append(StateLayer(layer.state(0).clone(), layer.state(1).clone()))
        else:
            assert isinstance(layer, TokenLayer), "a batch is not forked"
            layers.append(layer.fork())
    return Cache(layers=layers)


def token_layer(cache: Cache, index: int) -> TokenLayer:
    """Keys and values of one request in model layer ``index``, which has such."""
    layer = cache.layers[index]
    held = layer.attention if isinstance(layer, SideBySideLayer) else layer
    assert isinstance(held, TokenLayer), f"layer {index} holds no tokens of one request"
    return held


def state_layer(cache: Cache, index: int) -> StateLayer:
    """The state in model layer ``index``, which has one."""
    held = cache.layers[index]
    assert isinstance(held, StateLayer), f"layer {index} holds no state"
    return held


def empty_cache(layout: KVLayout, expected: int, slack: int = 0) -> Cache:
    """A cache of no tokens for one request that will come to ``expected`` tokens (an estimate; more are welcome).

    Windows can be had as they were up to ``slack`` tokens ago.
    """
    attention: dict[int, TokenLayer] = {}
    states: dict[int, StateLayer] = {}
    for group in layout.groups:
        for layer in group.layers:
            first, second = layer.tensors
            if group.kind is GroupKind.STATE:
                states[layer.index] = StateLayer.zeros(first, second)
            else:
                attention[layer.index] = TokenLayer(first, second, group.window, expected, slack)
    layers: dict[int, CacheLayerMixin | LinearAttentionCacheLayerMixin] = {**attention, **states}
    for index in attention.keys() & states.keys():
        layers[index] = SideBySideLayer(attention[index], states[index].state(0), states[index].state(1))
    return Cache(layers=[layers[index] for index in range(len(layers))])
