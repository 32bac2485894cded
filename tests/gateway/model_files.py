"""A model directory without weights to speak of, as a gateway reads one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models import CONTEXT, VOCAB, write_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def write_model(path: Path) -> None:
    """Config, tokeniser, chat template, and a safetensors file of one number."""
    write_shell(path, CONTEXT, VOCAB)
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def write_shell(path: Path, context: int, vocab: int) -> None:
    """Config and a safetensors file of one number."""
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context,
        "vocab_size": vocab,
    }
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
