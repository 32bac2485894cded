"""The bytes that one token stands for, as the log-probability formats show them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE gives to the 256 byte values."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {decoder.get("type", "")} | {t for part in decoder.get("decoders", ()) for t in _decoder_types(part)}


class TokenText:
    """Maps token ids to bytes: byte-level BPE, SentencePiece with byte fallback, or plain text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec = json.loads(tokenizer.to_str())
        kinds = _decoder_types(spec.get("decoder"))
        self._tokenizer = tokenizer
        self._added = {entry["id"]: entry["content"] for entry in spec.get("added_tokens", ())}
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._pieces = bool(kinds & {"ByteFallback", "Metaspace", "Replace"})

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the tokeniser does not know."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            return bytes(self._alphabet[c] for c in piece if c in self._alphabet)
        if self._pieces:
            byte = _BYTE_TOKEN.match(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character show as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")


class TextOffsets:
    """Where each token of a growing answer begins in its text, in characters."""

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def advance(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._decoder.decode(self._text.bytes_of(token_id)))
        return offsets
