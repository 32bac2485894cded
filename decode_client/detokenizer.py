"""Token ids in, text out, one token at a time: never half a character, never a part of a stop string.

``TokenText`` turns tokens into text as soon as it is certain; ``StopFinder`` holds back what may begin a stop string;
``Detokenizer`` is the two in a row, and what a generation uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 8
"""Tokens before the first new one that its text may depend on (a leading space, a character of several tokens)."""


class TokenText:
    """The text of a growing token sequence. ``context`` are the ids before it; their own text is not repeated."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._certain: list[int] = []
        self._pending: list[int] = []
        self._said_before = ""
        for token_id in context[-CONTEXT_TOKENS:]:
            self._step(token_id)
        if self._pending:
            self._said_before = tokenizer.decode(self._pending, skip_special_tokens=True)

    def step(self, token_id: int) -> str:
        """The text that became certain with this token; "" inside a character of several tokens."""
        return self._new(self._step(token_id))

    def flush(self) -> str:
        """What the last tokens say although their last character is incomplete; after it, nothing is pending."""
        return self._new(self._flush())

    def _new(self, text: str) -> str:
        """``text`` less the context's own incomplete bytes, unless a new token completed them to a character."""
        if text:
            text, self._said_before = text.removeprefix(self._said_before), ""
        return text

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library raises bare Exception where bytes that are no text change what came before
            text = self._flush()
            self._stream = DecodeStream(skip_special_tokens=True)
            return text
        if text is None:
            return ""
        self._certain, self._pending = self._pending, []
        return text

    def _flush(self) -> str:
        pending, self._pending = self._pending, []
        if not pending:
            return ""
        before = self._tokenizer.decode(self._certain, skip_special_tokens=True)
        whole = self._tokenizer.decode(self._certain + pending, skip_special_tokens=True)
        self._certain = pending
        if whole.startswith(before):
            return whole[len(before) :]
        return self._tokenizer.decode(pending, skip_special_tokens=True)


class StopFinder:
    """Finds the earliest stop string in text that comes in parts, and holds back a tail that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        if any(not stop for stop in stops):
            raise ValueError("stop: a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown, and the stop string that was met, if any; after one, feed no more."""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            shown, self._held = self._held[:at], ""
            return shown, stop
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """The held text: no stop string followed."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Said:
    """Text that became certain, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class Detokenizer:
    """One generation's text. After a ``Said`` with a stop, or after ``finish``, it takes no more tokens."""

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._text = TokenText(tokenizer, context)
        self._finder = StopFinder(stops)
        self._include_stop = include_stop

    def step(self, token_id: int) -> Said:
        """Take one token."""
        return self._said(self._text.step(token_id))

    def finish(self) -> Said:
        """The rest, when no more tokens come; it may still complete a stop string."""
        said = self._said(self._text.flush())
        return said if said.stop is not None else Said(said.text + self._finder.flush())

    def _said(self, text: str) -> Said:
        shown, stop = self._finder.feed(text)
        return Said(shown + stop if stop is not None and self._include_stop else shown, stop)
