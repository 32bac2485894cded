"""What an engine is told when it starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvcache.blocks import BLOCK_TOKENS
from kvcache.layout import DType

REFUSAL = "cannot serve"
"""How the line begins with which an engine process that refuses its model ends."""


class EngineSpec(msgspec.Struct, frozen=True):
    """One engine's model and limits.

    ``chunk_tokens`` is the absolute grid of every prefill. ``context_tokens`` None takes the model's own limit.
    ``max_running`` bounds the generations that hold engine memory, ``max_queue`` the jobs that wait, of either kind.
    ``self_check`` False skips the comparison of chunked with whole prefill at the start.
    """

    model_dir: Path
    dtype: DType
    block_tokens: int = BLOCK_TOKENS
    chunk_tokens: int = 256
    threads: int = 1
    max_running: int = 16
    max_queue: int = 64
    context_tokens: int | None = None
    self_check: bool = True

    def __post_init__(self) -> None:
        for field in ("block_tokens", "chunk_tokens", "threads", "max_running", "max_queue"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.context_tokens is not None and self.context_tokens < 1:
            raise ValueError(f"context_tokens must be at least 1, got {self.context_tokens}")

    @property
    def max_jobs(self) -> int:
        """Jobs that an engine knows of at any time."""
        return self.max_running + self.max_queue

    def to_json(self) -> str:
        """This spec as one argument of a command line."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def from_json(cls, text: str) -> EngineSpec:
        """The inverse of ``to_json``. Raises msgspec.ValidationError."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))
