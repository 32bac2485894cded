"""KV layouts from the config.json of a model, without loading the model.

Each entry follows what the model's code in transformers really caches: windows keep W - 1 tokens, convolution states
keep K inputs in the model's dtype, recurrent states are fp32, MLA keeps its latent and the shared rotary part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec

Config = Mapping[str, Any]

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_WITHOUT_CACHE = ("mlp", "moe")
_RENAMED_TYPES = {"attention": _FULL, "mamba": _LINEAR}
_MAX_LAYERS = 4096
_COUNTS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "v_head_dim"),
    *("sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers"),
    *("full_attention_interval", "kv_lora_rank", "qk_rope_head_dim", "linear_conv_kernel_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_heads", "linear_head_dim", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    *("mamba_d_ssm", "mamba_expand", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
)
_TEXT_LISTS = ("layer_types", "layers_block_type")


class UnsupportedArchitecture(ValueError):
    """No layout is known for this model_type."""


class _Layers:
    """Collects layers in ascending order and groups them by kind and window."""

    def __init__(self) -> None:
        self._groups: dict[tuple[GroupKind, int | None], list[LayerSpec]] = {}

    def add(self, kind: GroupKind, index: int, tensors: Sequence[TensorSpec], window: int | None = None) -> None:
        self._groups.setdefault((kind, window), []).append(LayerSpec(index, tuple(tensors)))

    def layout(self) -> KVLayout:
        order = list(GroupKind)
        keys = sorted(self._groups, key=lambda key: (order.index(key[0]), key[1] or 0))
        return KVLayout(tuple(GroupSpec(kind, tuple(self._groups[kind, w]), w) for kind, w in keys))


def read_config(model_dir: Path) -> dict[str, Any]:
    """A model directory's config.json. Raises FileNotFoundError, and ValueError where it is no JSON object."""
    file = model_dir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"model directory {model_dir} has no config.json")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("config.json is not a JSON object")
    return config


def layout_from_config(config: Config, dtype: DType) -> KVLayout:
    """The layout of the model that ``config`` (a parsed config.json) describes, run in ``dtype``.

    Multimodal configs are read at their ``text_config``. Token groups hold ``k`` and ``v`` of (heads, dim), or for MLA
    ``latent`` and ``rope`` of (1, dim): what transformers keeps as keys and values, in this order. States hold ``conv``
    of (channels, kernel) and ``recurrent``. Groups come in the order full, sliding (by window), state.

    Raises UnsupportedArchitecture naming the model_type; ValueError naming a field that is missing or contradictory.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config must be an object, got {type(text).__name__}")
    model_type = text.get("model_type") or config.get("model_type")
    build = _BUILDERS.get(str(model_type))
    if build is None:
        raise UnsupportedArchitecture(f"model_type {model_type!r} is not supported; known are {', '.join(_BUILDERS)}")
    _check_types(text)
    return build(text, dtype)


def _check_types(config: Config) -> None:
    for field in _COUNTS:
        value = config.get(field)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"config.json: {field} must be a positive integer, got {value!r}")
    if config.get("num_hidden_layers", 1) > _MAX_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers is {config['num_hidden_layers']}, more than {_MAX_LAYERS}")
    for field in _TEXT_LISTS:
        value = config.get(field)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
            raise ValueError(f"config.json: {field} must be a list of texts, got {value!r}")


def _need(config: Config, field: str) -> Any:
    value = config.get(field)
    if value is None:
        raise ValueError(f"config.json: {field} is missing, and model_type {config.get('model_type')!r} needs it")
    return value


def _layer_types(config: Config, default: Callable[[int], str]) -> list[str]:
    """The cache type of every layer, as the config lists them or as ``default`` gives them by layer index."""
    listed = config.get("layer_types") or config.get("layers_block_type")
    count = config.get("num_hidden_layers", len(listed) if listed else None)
    if listed is None:
        return [default(i) for i in range(_need(config, "num_hidden_layers"))]
    if len(listed) != count:
        raise ValueError(f"config.json: layer_types lists {len(listed)} layers, num_hidden_layers says {count}")
    return [_RENAMED_TYPES.get(name, name) for name in listed]


def _key_value(dtype: DType, heads: int, k_dim: int, v_dim: int | None = None) -> tuple[TensorSpec, ...]:
    return TensorSpec("k", dtype, (heads, k_dim)), TensorSpec("v", dtype, (heads, v_dim or k_dim))


def _state(dtype: DType, channels: int, kernel: int, recurrent: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    return TensorSpec("conv", dtype, (channels, kernel)), TensorSpec("recurrent", DType.FLOAT32, recurrent)


def _latent(config: Config, dtype: DType) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("latent", dtype, (1, _need(config, "kv_lora_rank"))),
        TensorSpec("rope", dtype, (1, _need(config, "qk_rope_head_dim"))),
    )


def _grouped_query(config: Config, dtype: DType, head_dim: int | None = None) -> tuple[TensorSpec, ...]:
    """K and V of plain attention; ``head_dim`` is the model type's default, where it has one."""
    heads = _need(config, "num_attention_heads")
    dim = config.get("head_dim") or head_dim or _need(config, "hidden_size") // heads
    return _key_value(dtype, config.get("num_key_value_heads") or heads, dim)


def _attention(
    config: Config, types: Sequence[str], full: Sequence[TensorSpec], sliding: Sequence[TensorSpec] | None = None
) -> KVLayout:
    """A model of full and sliding attention layers, alike but where ``sliding`` differs."""
    layers = _Layers()
    for i, name in enumerate(types):
        if name == _FULL:
            layers.add(GroupKind.FULL, i, full)
        elif name == _SLIDING:
            layers.add(GroupKind.SLIDING, i, sliding or full, _need(config, "sliding_window"))
        else:
            raise _unknown_type(config, i, name)
    return layers.layout()


def _with_states(
    config: Config, types: Sequence[str], full: Sequence[TensorSpec], state: Sequence[TensorSpec]
) -> KVLayout:
    """A model in which each layer holds full attention, a state or nothing."""
    layers = _Layers()
    for i, name in enumerate(types):
        if name == _FULL:
            layers.add(GroupKind.FULL, i, full)
        elif name == _LINEAR:
            layers.add(GroupKind.STATE, i, state)
        elif name not in _WITHOUT_CACHE:
            raise _unknown_type(config, i, name)
    return layers.layout()


def _unknown_type(config: Config, index: int, name: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(f"model_type {config.get('model_type')!r}: layer_types[{index}] is {name!r}")


def _dense(config: Config, dtype: DType) -> KVLayout:
    types = _layer_types(config, lambda i: _FULL)
    return _attention(config, types, _grouped_query(config, dtype))


def _mistral(config: Config, dtype: DType) -> KVLayout:
    config = {"sliding_window": 4096, **config}
    kind = _FULL if config["sliding_window"] is None else _SLIDING
    return _attention(config, _layer_types(config, lambda i: kind), _grouped_query(config, dtype))


def _mixtral(config: Config, dtype: DType) -> KVLayout:
    return _mistral({"sliding_window": None, **config}, dtype)


def _qwen(head_dim: int | None) -> Callable[[Config, DType], KVLayout]:
    def build(config: Config, dtype: DType) -> KVLayout:
        sliding_from = config.get("max_window_layers", 28) if config.get("use_sliding_window") else None
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        config = {**config, "sliding_window": window}
        types = _layer_types(config, lambda i: _SLIDING if sliding_from is not None and i >= sliding_from else _FULL)
        return _attention(config, types, _grouped_query(config, dtype, head_dim))

    return build


def _qwen3_moe(config: Config, dtype: DType) -> KVLayout:
    kind = _SLIDING if config.get("use_sliding_window") else _FULL
    config = {"sliding_window": 4096, **config}
    return _attention(config, _layer_types(config, lambda i: kind), _grouped_query(config, dtype))


def _gemma3(config: Config, dtype: DType) -> KVLayout:
    if config.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention is set; such a model has no cache to transfer")
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    types = _layer_types(config, lambda i: _SLIDING if (i + 1) % pattern else _FULL)
    return _attention({"sliding_window": 4096, **config}, types, _grouped_query(config, dtype, 256))


def _mimo_v2_flash(config: Config, dtype: DType) -> KVLayout:
    types = _layer_types(config, lambda i: _FULL if i == 0 or (i + 1) % 6 == 0 else _SLIDING)
    heads, k_dim, v_dim = (
        _need(config, "num_key_value_heads"),
        config.get("head_dim") or 192,
        config.get("v_head_dim") or 128,
    )
    full, sliding = _key_value(dtype, heads, k_dim, v_dim), _key_value(dtype, heads * 2, k_dim, v_dim)
    return _attention({"sliding_window": 128, **config}, types, full, sliding)


def _deepseek_v3(config: Config, dtype: DType) -> KVLayout:
    return _attention(config, _layer_types(config, lambda i: _FULL), _latent(config, dtype))


def _gated_delta_net(config: Config, dtype: DType) -> KVLayout:
    interval = config.get("full_attention_interval") or 4
    types = _layer_types(config, lambda i: _LINEAR if (i + 1) % interval else _FULL)
    k_heads, v_heads = _need(config, "linear_num_key_heads"), _need(config, "linear_num_value_heads")
    k_dim, v_dim = _need(config, "linear_key_head_dim"), _need(config, "linear_value_head_dim")
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    state = _state(dtype, channels, _need(config, "linear_conv_kernel_dim"), (v_heads, k_dim, v_dim))
    return _with_states(config, types, _grouped_query(config, dtype, 256), state)


def _kimi_linear(config: Config, dtype: DType) -> KVLayout:
    linear = config.get("linear_attn_config") or {}
    heads = linear.get("num_heads") or _need(config, "linear_num_heads")
    dim = linear.get("head_dim") or _need(config, "linear_head_dim")
    kernel = linear.get("short_conv_kernel_size") or _need(config, "linear_conv_kernel_dim")
    full_layers = linear.get("full_attn_layers")

    def default(i: int) -> str:
        full = i + 1 in full_layers if full_layers is not None else i and i % 4 == 0
        return _FULL if full else _LINEAR

    state = _state(dtype, 3 * heads * dim, kernel, (heads, dim, dim))
    return _with_states(config, _layer_types(config, default), _latent(config, dtype), state)


def _mamba2(dtype: DType, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> tuple[TensorSpec, ...]:
    return _state(dtype, heads * head_dim + 2 * groups * state, kernel, (heads, head_dim, state))


def _mamba_head_dim(config: Config, intermediate: int) -> int:
    dim = config.get("mamba_d_head", "auto")
    return int(intermediate // _need(config, "mamba_n_heads") if dim == "auto" else dim)


def _mamba_state(config: Config, dtype: DType, intermediate: int) -> tuple[TensorSpec, ...]:
    """The Mamba-2 state under the field names that granitemoehybrid, bamba and falcon_h1 share."""
    heads, groups, state = (_need(config, f"mamba_{name}") for name in ("n_heads", "n_groups", "d_state"))
    return _mamba2(dtype, heads, _mamba_head_dim(config, intermediate), groups, state, _need(config, "mamba_d_conv"))


def _granite_hybrid(config: Config, dtype: DType) -> KVLayout:
    state = _mamba_state(config, dtype, _need(config, "mamba_expand") * _need(config, "hidden_size"))
    types = _layer_types(config, lambda i: _LINEAR)
    return _with_states(config, types, _grouped_query(config, dtype), state)


def _bamba(config: Config, dtype: DType) -> KVLayout:
    """Its attention layers stand in ``attn_layer_indices``; layer types are never listed."""
    attention = config.get("attn_layer_indices") or []
    if not (isinstance(attention, list | tuple) and all(type(i) is int for i in attention)):
        raise ValueError(f"config.json: attn_layer_indices must be a list of integers, got {attention!r}")
    types = [_FULL if i in attention else _LINEAR for i in range(_need(config, "num_hidden_layers"))]
    state = _mamba_state(config, dtype, _need(config, "mamba_expand") * _need(config, "hidden_size"))
    return _with_states(config, types, _grouped_query(config, dtype), state)


def _falcon_h1(config: Config, dtype: DType) -> KVLayout:
    """Every layer holds attention and a state side by side."""
    inner = config.get("mamba_d_ssm") or _need(config, "mamba_expand") * _need(config, "hidden_size")
    full, state = _grouped_query(config, dtype), _mamba_state(config, dtype, inner)
    layers = _Layers()
    for i in range(_need(config, "num_hidden_layers")):
        layers.add(GroupKind.FULL, i, full)
        layers.add(GroupKind.STATE, i, state)
    return layers.layout()


def _nemotron_h(config: Config, dtype: DType) -> KVLayout:
    letters = {"M": _LINEAR, "E": "moe", "*": _FULL, "-": "mlp"}
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None:
        pattern = _need(config, "hybrid_override_pattern")
        unknown = set(pattern) - set(letters)
        if unknown:
            raise ValueError(f"config.json: hybrid_override_pattern holds {sorted(unknown)}, known are {list(letters)}")
        listed = [letters[letter] for letter in pattern]
    types = _layer_types({"layer_types": listed}, lambda i: _FULL)
    state = _mamba2(
        dtype,
        heads=_need(config, "mamba_num_heads"),
        head_dim=_need(config, "mamba_head_dim"),
        groups=config.get("mamba_n_groups") or _need(config, "n_groups"),
        state=_need(config, "ssm_state_size"),
        kernel=config.get("mamba_d_conv") or _need(config, "conv_kernel"),
    )
    return _with_states(config, types, _grouped_query(config, dtype, 128), state)


_BUILDERS: dict[str, Callable[[Config, DType], KVLayout]] = {
    "llama": _dense,
    "minimax_m2": _dense,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen(None),
    "qwen3": _qwen(128),
    "qwen3_moe": _qwen3_moe,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "mimo_v2_flash": _mimo_v2_flash,
    "deepseek_v3": _deepseek_v3,
    "qwen3_next": _gated_delta_net,
    "qwen3_5": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "kimi_linear": _kimi_linear,
    "granitemoehybrid": _granite_hybrid,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
}
