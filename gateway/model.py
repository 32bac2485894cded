"""The model that a gateway serves, read from its directory without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, load_chat_template
from gateway.config import ConfigError
from gateway.tokentext import TokenText
from kvcache.fingerprint import Fingerprint, fingerprint_of
from kvcache.layout import DType, KVLayout
from kvcache.layout_configs import layout_from_config


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, identity, layout and tokeniser. ``context_tokens`` bounds prompt and answer together."""

    name: str
    fingerprint: Fingerprint
    layout: KVLayout
    context_tokens: int
    vocab_size: int
    tokenizer: Tokenizer
    token_text: TokenText
    template: ChatTemplate | None

    @property
    def system_fingerprint(self) -> str:
        """A short name of what computes the answers, as clients see it."""
        return f"fp_{self.fingerprint.digest()[:12]}"


def load_model(model_dir: Path, name: str, dtype: DType, chat_template: Path | None = None) -> ServedModel:
    """Read ``config.json``, ``tokenizer.json``, the safetensors headers and the chat template. Raises ConfigError."""
    config_file, tokenizer_file = model_dir / "config.json", model_dir / "tokenizer.json"
    for file in (config_file, tokenizer_file):
        if not file.is_file():
            raise ConfigError(f"--model {model_dir}: {file.name} is missing; give a directory in Hugging Face format")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        layout = layout_from_config(config, dtype)
        fingerprint = fingerprint_of(model_dir, dtype)
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"--model {model_dir}: {error}") from error
    text_config = config.get("text_config", config)
    context = text_config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 2:
        raise ConfigError(f"--model {model_dir}: max_position_embeddings is missing in config.json")
    vocab = text_config.get("vocab_size")
    return ServedModel(
        name=name,
        fingerprint=fingerprint,
        layout=layout,
        context_tokens=context,
        vocab_size=vocab if isinstance(vocab, int) else tokenizer.get_vocab_size(),
        tokenizer=tokenizer,
        token_text=TokenText(tokenizer),
        template=load_chat_template(model_dir, chat_template),
    )
