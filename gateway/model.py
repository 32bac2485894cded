"""The model that a gateway's own nodes serve, read from its directory without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway.chat_template import ChatTemplate, load_chat_template
from gateway.config import ConfigError, GatewayConfig
from gateway.tokentext import TokenText
from kvcache.fingerprint import Fingerprint, fingerprint_of
from kvcache.layout import DType, KVLayout
from kvcache.layout_configs import layout_from_config, read_config

CONTEXT_FIELDS = ("max_position_embeddings", "model_max_length")
"""How configs call the longest context; the latter is Kimi Linear's."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, identity, layout and tokeniser. ``context_tokens`` bounds prompt and answer together.

    Its name is "" in a gateway without nodes of its own: no request can name it, no node has it, and nobody sees it.
    """

    name: str
    fingerprint: Fingerprint
    layout: KVLayout
    context_tokens: int
    vocab_size: int
    tokenizer: Tokenizer
    token_text: TokenText
    template: ChatTemplate | None

    @property
    def exists(self) -> bool:
        """Whether nodes may serve it."""
        return bool(self.name)

    def answers_to(self, name: str) -> bool:
        """Whether a request for ``name`` means this one."""
        return name == self.name and self.exists

    @property
    def system_fingerprint(self) -> str:
        """A short name of what computes the answers, as clients see it."""
        return f"fp_{self.fingerprint.digest()[:12]}"


def served_model(config: GatewayConfig) -> ServedModel:
    """What the configuration names, which may be none. Raises ConfigError."""
    if config.model_dir is None:
        return no_model()
    return load_model(config.model_dir, config.model_name, config.dtype, config.chat_template)


def no_model() -> ServedModel:
    """That of a gateway in front of engines that answer whole requests, and of no nodes."""
    tokenizer = Tokenizer(WordLevel({"": 0}, unk_token=""))
    nothing = Fingerprint("", "", "", "")
    return ServedModel("", nothing, KVLayout(()), 0, 0, tokenizer, TokenText(tokenizer), None)


def load_model(model_dir: Path, name: str, dtype: DType, chat_template: Path | None = None) -> ServedModel:
    """Read ``config.json``, ``tokenizer.json``, the safetensors headers and the chat template. Raises ConfigError."""
    try:
        config = read_config(model_dir)
        layout = layout_from_config(config, dtype)
        fingerprint = fingerprint_of(model_dir, dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model_dir}: {error}; give a model directory in Hugging Face format") from error
    try:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"--model {model_dir}: tokenizer.json: {error}; fetch the model again") from error
    text_config = config.get("text_config") or config
    context = next((text_config[field] for field in CONTEXT_FIELDS if field in text_config), None)
    if type(context) is not int or context < 2:
        fields = " or ".join(CONTEXT_FIELDS)
        raise ConfigError(f"--model {model_dir}: config.json: {fields} must be an integer above 1")
    vocab = text_config.get("vocab_size")
    return ServedModel(
        name=name,
        fingerprint=fingerprint,
        layout=layout,
        context_tokens=context,
        vocab_size=vocab if type(vocab) is int and vocab > 0 else tokenizer.get_vocab_size(),
        tokenizer=tokenizer,
        token_text=TokenText(tokenizer),
        template=load_chat_template(model_dir, chat_template),
    )
