"""Tokenising off the event loop: a bounded pool of threads; the tokeniser releases the GIL while it works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.errors import ApiError, bad_field

T = TypeVar("T")


class Tokenizing:
    """Text to ids and back. At most ``max_waiting`` calls wait or run at once; more are answered 503."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, threads: int = 2, max_waiting: int = 256
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._max_waiting = max_waiting
        self._waiting = 0

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the tokeniser's own post-processor adds BOS where the model wants one."""
        return await self._run(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation.

        A template that writes BOS itself gets no second one; under any other the tokeniser adds what it adds to a text.
        """
        template = self.template
        if template is None:
            raise bad_field(
                "messages",
                "this model has no chat template: send a prompt to /v1/completions, or start the gateway with "
                "--chat-template FILE",
                code="no_chat_template",
            )

        def work() -> list[int]:
            text = template.render(messages)
            written = bool(template.bos) and text.startswith(template.bos)
            return self.tokenizer.encode(text, add_special_tokens=not written).ids

        try:
            return await self._run(work)
        except ChatTemplateError as error:
            raise bad_field("messages", f"the chat template refuses these messages: {error}") from error

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self._run(lambda: self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= self._max_waiting:
            raise ApiError(503, "too many requests wait to be tokenised", code="overloaded", retry_after_s=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
