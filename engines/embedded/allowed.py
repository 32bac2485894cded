"""Which architectures the embedded engine runs. No torch here, so that a refusal comes at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARCHITECTURES = (
    *("gemma3_text", "gemma3", "llama"),
    *("deepseek_v3", "kimi_linear", "qwen3_next"),
    *("bamba", "falcon_h1", "granitemoehybrid"),
)
_RESTARTS = "its state restarts at every chunk"
_CLAMPS = "its time steps have a least value in chunks and none in steps of one token"
KNOWN_WRONG = {
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba", "zamba"), _RESTARTS),
    **dict.fromkeys(("nemotron_h", "zamba2"), _CLAMPS),
}
MOVING_ROPE = ("dynamic", "longrope")


def check_model_type(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a parsed config.json whose model_type is not known to be right.

    Some architectures restart their state at every chunk, silently (jamba does), so each one is admitted by name.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        reason = KNOWN_WRONG.get(model_type)
        raise ValueError(
            f"model_type {model_type!r} is not supported by the embedded engine"
            + (f" ({reason})" if reason else "")
            + f": allowed are {', '.join(ARCHITECTURES)}"
        )


def check_rope(config: Mapping[str, Any]) -> None:
    """Raises ValueError for rotary embeddings that depend on how much is read at once: chunks would change the keys."""
    for field, value in config.items():
        if not isinstance(value, Mapping):
            continue
        kind = value.get("rope_type", value.get("type"))
        if kind in MOVING_ROPE:
            raise ValueError(f"{field}: rope type {kind!r} is not supported, because it differs from chunk to chunk")
        check_rope(value)
