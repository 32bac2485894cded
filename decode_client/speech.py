"""What one generation says: tokens in, Deltas out, text never shown before it is certain, never later than that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_client.detokenizer import Detokenizer, Said
from engines.protocol import Token
from kvcache.control import Delta, TokenLogprob


class Speech:
    """Tokens that arrive in one turn of the event loop leave as one Delta, at the start of the next."""

    def __init__(
        self, generation: str, detokenizer: Detokenizer, report: Callable[[Delta], None], answer: int = 0
    ) -> None:
        self.tokens = 0
        """Tokens said, those of a stop string included."""
        self.stop_text: str | None = None
        """The stop string that was met; after it nothing more is said."""
        self._generation = generation
        self._answer = answer
        self._detokenizer = detokenizer
        self._report = report
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[tuple[TokenLogprob, ...]] = []
        self._flush: asyncio.Handle | None = None

    def say(self, token: Token) -> None:
        """Take one token; ``stop_text`` tells whether it was the last."""
        if self.stop_text is not None:
            return
        self.tokens += 1
        self._token_ids.append(token.token_id)
        if token.logprobs is not None:
            self._logprobs.append(token.logprobs)
        self._add(self._detokenizer.step(token.token_id))
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self.flush)

    def finish(self) -> None:
        """No more tokens come: say what was held back."""
        if self.stop_text is None:
            self._add(self._detokenizer.finish())
        self.flush()

    def flush(self) -> None:
        """Say now what waits for the next turn."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        text, tokens, logprobs = "".join(self._text), tuple(self._token_ids), tuple(self._logprobs)
        if text or tokens:
            self._report(Delta(self._generation, text, tokens, logprobs or None, self._answer))
        self._text, self._token_ids, self._logprobs = [], [], []

    def _add(self, said: Said) -> None:
        if said.text:
            self._text.append(said.text)
        self.stop_text = said.stop
