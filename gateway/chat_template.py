"""Chat templates: Jinja from the model's directory or the operator, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.config import ConfigError


class ChatTemplateError(ValueError):
    """These messages do not render."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{origin}: line {error.lineno}: {error.message}") from error
        self._special = dict(special_tokens)
        self.bos = self._special.get("bos_token", "")

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation. Raises ChatTemplateError with the template's own words."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._special
            )
        except Exception as error:  # a template may fail in any way its expressions can
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def load_chat_template(model_dir: Path, override: Path | None) -> ChatTemplate | None:
    """The operator's file, the model's ``chat_template.jinja``, or the one in ``tokenizer_config.json``; else None.

    Raises ConfigError for a file that cannot be read or compiled.
    """
    settings = _settings(model_dir / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: text for name in names if (text := _text(settings.get(name)))}
    file = override or model_dir / "chat_template.jinja"
    origin = f"--chat-template {file}" if override else str(file)
    if override is not None or file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), special, origin)
        except OSError as error:
            raise ConfigError(f"{origin}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{origin}: not UTF-8: {error.reason} at byte {error.start}") from error
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    return (
        ChatTemplate(source, special, f"chat_template in {model_dir / 'tokenizer_config.json'}")
        if isinstance(source, str)
        else None
    )


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _text(token: Any) -> str | None:
    """A special token is written as text or as an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
