"""Which architectures the embedded engine runs. No torch here, so that a refusal comes at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARCHITECTURES = ("gemma3_text", "gemma3", "llama", "qwen3_next")


def check_model_type(config: Mapping[str, Any]) -> str:
    """The model_type of a parsed config.json. Raises ValueError for one that is not known to be right.

    Some architectures restart their state at every chunk, silently (jamba does), so each one is admitted by name.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type {model_type!r} is not supported by the embedded engine: allowed are {', '.join(ARCHITECTURES)}"
        )
    return model_type
